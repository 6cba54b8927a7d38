# Record once, replay everywhere, and check a sample of replays against live runs.
#
# A recording is a function of checkpoint, draft, live code and plan, all of which are inputs of the rules below too.
# So the manifests themselves are `ancient`: recording one more K re-runs no experiment that does not use it.


rule record:
    # All live runs that any experiment needs of one model and data set. Finished recordings outlive a killed job.
    input:
        checkpoint,
        quantized,
        rules.preflight.output,
        prompts,
        code(*LIVE_CODE, "harness/record.py"),
    output:
        "results/{scale}/recordings/{model}/{dataset}.json",
    params:
        plan=lambda wildcards: plan.live_plan(wildcards.scale, wildcards.model, wildcards.dataset).to_yaml(),
    log:
        "results/{scale}/logs/record-{model}-{dataset}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.record --scale {wildcards.scale} --model {wildcards.model} --dataset {wildcards.dataset} "
        "--out {output} > {log}"


rule replay:
    # Every system, budget, K and machine of one experiment, through the engine itself.
    input:
        checkpoint,
        quantized,
        prompts,
        code(*LIVE_CODE, "specter/experts/*.py", "specter/timeline/*.py", "specter/floors.py", "specter/metrics.py"),
        code("specter/build.py", "specter/records.py", "specter/run.py", "baselines/*.py", "harness/replay.py"),
        manifest=ancient(rules.record.output),
    output:
        directory("results/{scale}/{experiment}/{model}/{dataset}"),
    params:
        plan=lambda wildcards: plan.matrix(
            wildcards.scale, wildcards.experiment, wildcards.model, wildcards.dataset
        ).to_yaml(),
    log:
        "results/{scale}/logs/replay-{experiment}-{model}-{dataset}.log",
    wildcard_constraints:
        experiment="|".join(EXPERIMENTS),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.replay --experiment {wildcards.experiment} --scale {wildcards.scale} --model {wildcards.model} "
        "--dataset {wildcards.dataset} --out {output} {input.manifest} > {log}"


rule live_check:
    # A sample of the main experiment's runs, live: their records must equal the replays' byte for byte.
    input:
        code("harness/live_check.py"),
        replays=lambda wildcards: replays(wildcards.scale, "main", wildcards.model),
    output:
        "results/{scale}/live_check/{model}.json",
    params:
        num_checks=lambda wildcards: plan.load_scale(wildcards.scale).num_live_checks,
    log:
        "results/{scale}/logs/live_check-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.live_check --num-checks {params.num_checks} --out {output} {input.replays} > {log}"


rule tidy:
    # One row per run.
    input:
        code("harness/tidy.py"),
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
        "python -m harness.tidy --out {output} {input.replays} > {log}"


use rule tidy as tidy_probe with:
    input:
        code("harness/tidy.py"),
        replays=lambda wildcards: [
            f"results/{wildcards.scale}/probe/{model}.parquet" for model in plan.load_scale(wildcards.scale).models
        ],
    output:
        "results/{scale}/tidy/probe.parquet",
    log:
        "results/{scale}/logs/tidy-probe.log",
    wildcard_constraints:
        scale="|".join(SCALES),
