# From a checkpoint to a draft, and what the draft is worth.


rule preflight:
    # Refuses a scale that this machine cannot run, before anything large starts.
    input:
        code("harness/preflight.py"),
    output:
        "results/{scale}/preflight.json",
    params:
        plan=lambda wildcards: plan.digest(plan.load_scale(wildcards.scale)),
    log:
        "results/{scale}/logs/preflight.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.preflight --scale {wildcards.scale} --out {output} > {log}"


rule quantize:
    # INT4 experts by GPTQ, as an AutoGPTQ directory. One for all scales.
    input:
        checkpoint,
        "data/standins/calibration.safetensors",
        code("specter/quantize/*.py", "specter/model/*.py"),
    output:
        directory("results/quantized/{model}/{method}"),
    params:
        checkpoint=lambda wildcards: model_config(wildcards).checkpoint,
    log:
        "results/quantized/logs/{model}-{method}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m specter.quantize checkpoint={params.checkpoint:q} out={output} method={wildcards.method} "
        "group=128 threads={threads} > {log}"


rule probe:
    # Routing fidelity, acceptance and expert union: from the recordings, and teacher-forced on held-out text.
    input:
        checkpoint,
        quantized,
        code(*plan.LIVE_CODE, "specter/probes/*.py", "harness/probe.py"),
        "data/prompts/heldout.jsonl",
        tokenizer,
        manifests=lambda wildcards: manifests(wildcards, "main"),
    output:
        "results/{scale}/probe/{model}.parquet",
    params:
        plan=lambda wildcards: plan.digest(plan.probe_plan(**wildcards)),
    log:
        "results/{scale}/logs/probe-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.probe {input.manifests} --scale {wildcards.scale} --model {wildcards.model} "
        "--out {output} > {log}"
