# What the rules share: the digests of their code, the files that they read, and what a scale delivers.
EXPERIMENTS = [path.stem for path in sorted((scales.CONF / "experiment").glob("*.yaml"))]
DRILLED = ("main", "residual", "timeline")  # experiments whose runs the report has in detail
NUM_DATASETS = {"decomposition": 1, "lanes": None}  # of the probes that have a table by data set; None: all


def scales_on(clock):
    """The scales on this clock, as a pattern."""
    return "|".join(name for name in SCALES if scales.load_scale(name).clock == clock)


def listed(name):
    """The input of this name, as a list on a command line."""
    return lambda wildcards, input: ",".join(input[name])


def model_config(wildcards):
    return plan.compose([f"model={wildcards.model}"]).model


def checkpoint(wildcards):
    """The files of a model's checkpoint. None are listed for one that is not there: `preflight` reports it."""
    return sorted(str(path) for path in Path(model_config(wildcards).checkpoint).glob("*") if path.is_file())


def tokenizer(wildcards):
    """The model's tokenizer, if it is there (see `checkpoint`)."""
    path = model_config(wildcards).tokenizer
    return [path] if Path(path).is_file() else []


def quantized(wildcards):
    return model_config(wildcards).quantized


def residual(wildcards, experiment=None):
    """The residual directory, if a system of the experiment runs on it."""
    needed = plan.runs_on_residual(experiment or wildcards.experiment)
    return [model_config(wildcards).residual] if needed else []


def live_checked(wildcards):
    """The experiments whose systems are repeated live on a model."""
    size = scales.load_scale(wildcards.scale)
    return [name for name in ("main", "residual") if wildcards.model in size.models_of(name)]


def studied(wildcards):
    """The drafts that the fidelity study reads; it makes the others itself."""
    methods = scales.load_probe(wildcards.scale).methods
    return [f"results/quantized/{wildcards.model}/{method}" for method in methods if method in ("gptq", "awq")]


def prompts(wildcards):
    """The prompts that ship with the artifact; a hub data set has no file here."""
    dataset = plan.compose([f"dataset={wildcards.dataset}"]).dataset
    return [dataset.path, "data/prompts/warmup.txt"] if dataset.source == "shipped" else ["data/prompts/warmup.txt"]


def manifests(wildcards, experiment):
    directory = f"results/{wildcards.scale}/manifests/{experiment}/{wildcards.model}"
    return [f"{directory}/{dataset}.json" for dataset in scales.datasets(wildcards.scale, experiment, wildcards.model)]


def runs_of(scale, experiment, only_model=None):
    """The directories of an experiment's runs. Raises an error if the scale does not run the experiment."""
    scales.check_listed(scale, experiment)
    models = scales.load_scale(scale).models_of(experiment) if only_model is None else [only_model]
    return [
        f"results/{scale}/{experiment}/{model}/{dataset}"
        for model in models
        for dataset in scales.datasets(scale, experiment, model)
    ]


def probe_tables(scale, probe):
    """The tables of a probe: one of each model, or of each of its explained data sets."""
    if probe == "claims":
        return [f"results/{scale}/check.parquet"]
    models = scales.load_scale(scale).models_of(probe)
    if probe not in NUM_DATASETS:
        return [f"results/{scale}/{probe}/{model}.parquet" for model in models]
    return [
        f"results/{scale}/{probe}/{model}/{dataset}.parquet"
        for model in models
        for dataset in scales.datasets(scale, scales.PROBES[probe], model)[: NUM_DATASETS[probe]]
    ]


def tidied(scale, names):
    return [f"results/{scale}/tidy/{name}.parquet" for name in names]


def checked_sources(scale):
    """The tidy tables that claims read, as far as the scale makes them."""
    size = scales.load_scale(scale)
    return [name for name in tidy_sources(CLAIMS) if size.models_of(name)]


def figure_study(wildcards):
    """What the file of a figure shows: its name is the figure's, or the figure's with a model behind a dash."""
    return catalogue.FIGURES[wildcards.figure.partition("-")[0]]


def listed_output(wildcards, output):
    """The output files as one argument of a command line."""
    return ",".join(output)


def figures(scale, kind):
    return [f"figures/{scale}/{name}.{kind}" for name in catalogue.figures(scale)]


def tables(scale, *kinds):
    return [f"paper_tables/{scale}/{name}.{kind}" for name in catalogue.tables(scale) for kind in kinds]


def measured_names(studies):
    """The figures or tables of every machine that has records, as files are named."""
    machines = [path for path in sorted(Path("data/reference").glob("*")) if path.is_dir()]
    return [f"{machine.name}_{name}" for machine in machines for name in catalogue.of_device(studies, machine)]


def measured_figures(kind):
    return [f"figures/device/{name}.{kind}" for name in measured_names(catalogue.FIGURES)]


def measured():
    """Figures and tables of every machine that has records."""
    names = measured_names(catalogue.TABLES)
    tables = [f"paper_tables/device/{name}.{kind}" for name in names for kind in ("tex", "md", "csv")]
    return [*measured_figures("pdf"), *measured_figures("png"), *tables]


def captions(scale):
    """Of the figures of a scale and of all records, in their order."""
    return [
        *[f"results/{scale}/figures/{name}.json" for name in catalogue.figures(scale)],
        *[f"results/device/figures/{name}.json" for name in measured_names(catalogue.FIGURES)],
    ]


def drilled(pattern, scale):
    """A path for every experiment and model whose runs the page has in detail, of the first data set."""
    size = scales.load_scale(scale)
    return [
        pattern.format(scale=scale, experiment=name, model=model, dataset=scales.datasets(scale, name, model)[0])
        for name in DRILLED
        for model in size.models_of(name)
    ]


def live_checks(size):
    """Comparisons of replays with live runs; on the device clock all runs are live."""
    return [f"results/{size.name}/live_check/{model}.json" for model in size.models] if size.clock == "virtual" else []


def device_records(machine, study):
    """The files of a machine that a study is made from."""
    return [str(path) for path in catalogue.records(Path("data/reference") / machine, study)]


def deliverables(scale):
    size = scales.load_scale(scale)
    return [
        *measured(),
        *figures(scale, "pdf"),
        *figures(scale, "png"),
        *tables(scale, "tex", "md", "csv"),
        *tidied(scale, size.experiments),
        *live_checks(size),
        f"results/{scale}/report.html",
    ]
