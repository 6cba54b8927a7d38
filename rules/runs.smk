# Record once, replay everywhere, and check a sample of replays against live runs; or measure on a GPU.


rule record:
    # The live runs that an experiment replays on one model and data set. All experiments share recordings, which are
    # named by what decides their content and kept by a killed job: each is made once.
    input:
        checkpoint,
        quantized,
        rules.preflight.output,
        prompts,
        tokenizer,
    output:
        "results/{scale}/manifests/{experiment}/{model}/{dataset}.json",
    params:
        plan=lambda wildcards: plan.digest(plan.recording_runs(**wildcards)),
        code=code_digest("harness.jobs.record", "baselines"),
    log:
        "results/{scale}/logs/record-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("virtual"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.record scale={wildcards.scale} experiment={wildcards.experiment} "
        "model={wildcards.model} dataset={wildcards.dataset} out={output}"


rule replay:
    # Every system, budget, K and machine of one experiment, through the engine itself.
    input:
        residual,  # its blobs' sizes are what the clock charges
        manifest=rules.record.output,
    output:
        directory("results/{scale}/{experiment}/{model}/{dataset}"),
    params:
        plan=lambda wildcards: plan.digest(plan.experiment_runs(**wildcards)),
        code=code_digest("harness.jobs.replay", "baselines"),
    log:
        "results/{scale}/logs/replay-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("virtual"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.replay scale={wildcards.scale} experiment={wildcards.experiment} "
        "model={wildcards.model} dataset={wildcards.dataset} manifest={input.manifest} out={output}"


rule measure:
    # At a scale on the device clock, instead of recording and replaying: every run of one experiment, model and data
    # set, live on the GPU. A killed job keeps its finished runs. Takes all cores, so that no other job runs beside it.
    input:
        checkpoint,
        quantized,
        residual,
        rules.preflight.output,
        prompts,
        tokenizer,
    output:
        runs=directory("results/{scale}/{experiment}/{model}/{dataset}"),
        manifest="results/{scale}/manifests/{experiment}/{model}/{dataset}.json",
    params:
        plan=lambda wildcards: plan.digest(plan.experiment_runs(**wildcards)),
        code=code_digest("harness.jobs.measure", "baselines"),
    log:
        "results/{scale}/logs/measure-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("device"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: workflow.cores
    shell:
        "logged {log} python -m harness.jobs.measure scale={wildcards.scale} experiment={wildcards.experiment} "
        "model={wildcards.model} dataset={wildcards.dataset} out={output.runs} manifest={output.manifest}"


rule live_check:
    # Systems of `main` and `residual` live: their records must equal the replays' byte for byte.
    input:
        lambda wildcards: [path for name in live_checked(wildcards) for path in residual(wildcards, name)],
        replays=lambda wildcards: [
            path for name in live_checked(wildcards) for path in runs_of(wildcards.scale, name, wildcards.model)
        ],
    output:
        "results/{scale}/live_check/{model}.json",
    params:
        code=code_digest("harness.jobs.live_check", "baselines"),
        replays=listed("replays"),
        turn=lambda wildcards: scales.load_scale(wildcards.scale).models.index(wildcards.model),
    log:
        "results/{scale}/logs/live_check-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.live_check replays={params.replays} turn={params.turn} out={output}"


rule tidy:
    # A row per run, and a row per round.
    input:
        runs=lambda wildcards: runs_of(wildcards.scale, wildcards.experiment),
    output:
        runs="results/{scale}/tidy/{experiment}.parquet",
        rounds="results/{scale}/tidy/rounds/{experiment}.parquet",
    params:
        code=code_digest("harness.jobs.tidy"),
        runs=listed("runs"),
    log:
        "results/{scale}/logs/tidy-{experiment}.log",
    wildcard_constraints:
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.tidy sources={params.runs} out={output.runs} rounds={output.rounds}"


rule tidy_probe:
    # The tables of a probe, of all models in one.
    input:
        tables=lambda wildcards: probe_tables(wildcards.scale, wildcards.probe),
    output:
        "results/{scale}/tidy/{probe}.parquet",
    params:
        code=code_digest("harness.jobs.tidy"),
        tables=listed("tables"),
    log:
        "results/{scale}/logs/tidy-{probe}.log",
    wildcard_constraints:
        probe="|".join(scales.PROBES),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.tidy sources={params.tables} out={output}"


rule decompose:
    # Splits the speed-up over each baseline into parts: more replays of the experiment `main`.
    input:
        manifest="results/{scale}/manifests/main/{model}/{dataset}.json",
    output:
        "results/{scale}/decomposition/{model}/{dataset}.parquet",
    params:
        plan=lambda wildcards: plan.digest(plan.decomposed_pairs(**wildcards)),
        code=code_digest("harness.jobs.decompose", "baselines"),
    log:
        "results/{scale}/logs/decompose-{model}-{dataset}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.decompose scale={wildcards.scale} model={wildcards.model} "
        "dataset={wildcards.dataset} manifest={input.manifest} out={output}"


rule lanes:
    # The runs of the experiment `timeline`, operation by operation.
    input:
        lambda wildcards: residual(wildcards, "timeline"),
        manifest="results/{scale}/manifests/timeline/{model}/{dataset}.json",
    output:
        "results/{scale}/lanes/{model}/{dataset}.parquet",
    params:
        plan=lambda wildcards: plan.digest(plan.experiment_runs(experiment="timeline", **wildcards)),
        code=code_digest("harness.jobs.lanes", "baselines"),
    log:
        "results/{scale}/logs/lanes-{model}-{dataset}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.lanes scale={wildcards.scale} model={wildcards.model} "
        "dataset={wildcards.dataset} manifest={input.manifest} out={output}"


rule offload:
    # The transformers library with its own offloading: wall time of this machine, in a table of its own.
    input:
        checkpoint,
        rules.preflight.output,
        tokenizer,
    output:
        "results/{scale}/transformers_offload/{model}.parquet",
    params:
        code=code_digest("harness.jobs.offload", "baselines"),
    log:
        "results/{scale}/logs/offload-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.offload model={wildcards.model} out={output}"
