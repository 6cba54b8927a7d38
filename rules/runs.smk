# Record once, replay everywhere, and check a sample of replays against live runs; or measure on a GPU.


rule record:
    # The live runs that an experiment needs of one model and data set. Recordings are shared by all experiments, named
    # by what decides their content, and outlive a killed job: each is made once.
    input:
        checkpoint,
        quantized,
        rules.preflight.output,
        prompts,
        tokenizer,
        code(*plan.LIVE_CODE, "harness/jobs/record.py"),
    output:
        "results/{scale}/manifests/{experiment}/{model}/{dataset}.json",
    params:
        plan=lambda wildcards: plan.digest(plan.live_plan(**wildcards)),
    log:
        "results/{scale}/logs/record-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("virtual"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.record --scale {wildcards.scale} --experiment {wildcards.experiment} "
        "--model {wildcards.model} --dataset {wildcards.dataset} --out {output} > {log}"


rule replay:
    # Every system, budget, K and machine of one experiment, through the engine itself.
    input:
        code("harness/jobs/replay.py", *REPLAY_CODE),
        manifest=rules.record.output,
    output:
        directory("results/{scale}/{experiment}/{model}/{dataset}"),
    params:
        plan=lambda wildcards: plan.digest(plan.matrix(**wildcards)),
    log:
        "results/{scale}/logs/replay-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("virtual"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.replay {input.manifest} --scale {wildcards.scale} --experiment {wildcards.experiment} "
        "--model {wildcards.model} --dataset {wildcards.dataset} --out {output} > {log}"


rule measure:
    # At a scale on the device clock, instead of recording and replaying: every run of one experiment, model and data
    # set, live on the GPU. Finished runs outlive a killed job. Takes all cores, so that nothing runs beside it.
    input:
        checkpoint,
        quantized,
        rules.preflight.output,
        prompts,
        tokenizer,
        code("specter/**/*.py", "baselines/*.py", "harness/jobs/measure.py"),
    output:
        runs=directory("results/{scale}/{experiment}/{model}/{dataset}"),
        manifest="results/{scale}/manifests/{experiment}/{model}/{dataset}.json",
    params:
        plan=lambda wildcards: plan.digest(plan.matrix(**wildcards)),
    log:
        "results/{scale}/logs/measure-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        scale=scales_on("device"),
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: workflow.cores
    shell:
        "python -m harness.jobs.measure --scale {wildcards.scale} --experiment {wildcards.experiment} "
        "--model {wildcards.model} --dataset {wildcards.dataset} --out {output.runs} --manifest {output.manifest} > {log}"


rule live_check:
    # A sample of the main experiment's runs, live: their records must equal the replays' byte for byte.
    input:
        code("harness/jobs/live_check.py"),
        replays=lambda wildcards: replays(wildcards.scale, "main", wildcards.model),
    output:
        "results/{scale}/live_check/{model}.json",
    params:
        num_checks=lambda wildcards: scales.load_scale(wildcards.scale).num_live_checks,
    log:
        "results/{scale}/logs/live_check-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.live_check {input.replays} --num-checks {params.num_checks} --out {output} > {log}"


rule tidy:
    # One row per run.
    input:
        code("harness/jobs/tidy.py"),
        replays=lambda wildcards: replays(wildcards.scale, wildcards.experiment),
    output:
        "results/{scale}/tidy/{experiment}.parquet",
    log:
        "results/{scale}/logs/tidy-{experiment}.log",
    wildcard_constraints:
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.tidy {input.replays} --out {output} > {log}"


rule decompose:
    # Where the speed-up over each rival comes from: more replays of the experiment `rivals`.
    input:
        code("harness/jobs/decompose.py", *REPLAY_CODE),
        manifest="results/{scale}/manifests/rivals/{model}/{dataset}.json",
    output:
        "results/{scale}/decomposition/{model}/{dataset}.parquet",
    params:
        plan=lambda wildcards: plan.digest(plan.decomposition_plan(**wildcards)),
    log:
        "results/{scale}/logs/decompose-{model}-{dataset}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.decompose {input.manifest} --scale {wildcards.scale} --model {wildcards.model} "
        "--dataset {wildcards.dataset} --out {output} > {log}"


rule offload:
    # The real transformers library with its offload: wall time of this machine, in a table of its own.
    input:
        checkpoint,
        rules.preflight.output,
        tokenizer,
        code(*plan.LIVE_CODE, "baselines/transformers_offload.py", "bench/eager.py", "harness/jobs/offload.py"),
    output:
        "results/{scale}/transformers_offload/{model}.parquet",
    log:
        "results/{scale}/logs/offload-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.offload --model {wildcards.model} --out {output} > {log}"


use rule tidy as tidy_probe with:
    input:
        code("harness/jobs/tidy.py"),
        replays=lambda wildcards: of_models(wildcards.scale, wildcards.probe),
    output:
        "results/{scale}/tidy/{probe}.parquet",
    log:
        "results/{scale}/logs/tidy-{probe}.log",
    wildcard_constraints:
        scale="|".join(SCALES),
        probe="probe|fidelity",


use rule tidy as tidy_decomposition with:
    input:
        code("harness/jobs/tidy.py"),
        replays=lambda wildcards: [
            f"results/{wildcards.scale}/decomposition/{model}/{dataset}.parquet"
            for model in scales.load_scale(wildcards.scale).models_of("decomposition")
            for dataset in scales.datasets(wildcards.scale, "rivals", model)[:NUM_DECOMPOSED]
        ],
    output:
        "results/{scale}/tidy/decomposition.parquet",
    log:
        "results/{scale}/logs/tidy-decomposition.log",
    wildcard_constraints:
        scale="|".join(SCALES),


use rule tidy as tidy_offload with:
    input:
        code("harness/jobs/tidy.py"),
        replays=lambda wildcards: of_models(wildcards.scale, "transformers_offload"),
    output:
        "results/{scale}/tidy/transformers_offload.parquet",
    log:
        "results/{scale}/logs/tidy-offload.log",
    wildcard_constraints:
        scale="|".join(SCALES),
