# From a checkpoint to a draft, and what the draft is worth.


rule preflight:
    # Refuses a scale that this machine cannot run, before anything large starts.
    input:
        code("harness/jobs/preflight.py"),
    output:
        "results/{scale}/preflight.json",
    priority: 100  # `quantize` knows of no scale, and would otherwise run before it
    params:
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
    log:
        "results/{scale}/logs/preflight.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.preflight --scale {wildcards.scale} --out {output} > {log}"


rule quantize:
    # INT4 experts as an AutoGPTQ directory, one for all scales: by GPTQ, the draft; by AWQ for the fidelity study, which
    # a quarter of the calibration text serves as well. A killed job goes on behind its last layer.
    input:
        checkpoint,
        "data/standins/calibration.safetensors",
        code("specter/quantize/*.py", "specter/models/*.py"),
    output:
        directory("results/quantized/{model}/{method}"),
    params:
        checkpoint=lambda wildcards: model_config(wildcards).checkpoint,
        tokenizer=lambda wildcards: model_config(wildcards).tokenizer,
        sequences=lambda wildcards: 64 if wildcards.method == "awq" else 0,
        device=lambda wildcards: "cuda" if model_config(wildcards).checkpoint_kind == "hub" else "cpu",
    log:
        "results/quantized/logs/{model}-{method}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m specter.quantize checkpoint={params.checkpoint:q} out={output} method={wildcards.method} "
        "tokenizer={params.tokenizer:q} group=128 sequences={params.sequences} device={params.device} threads={threads} > {log}"


rule probe:
    # Routing fidelity, acceptance and expert union: from the recordings, and teacher-forced on held-out text.
    input:
        checkpoint,
        quantized,
        code(*plan.LIVE_CODE, "specter/probes/*.py", "harness/jobs/probe.py"),
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
        "python -m harness.jobs.probe {input.manifests} --scale {wildcards.scale} --model {wildcards.model} "
        "--out {output} > {log}"


rule fidelity:
    # How far each method and precision routes like the original, teacher-forced on recorded texts or on data sets.
    input:
        checkpoint,
        studied,
        code(
            "specter/models/*.py",
            "specter/quantize/*.py",
            "specter/probes/fidelity.py",
            "harness/jobs/fidelity.py",
        ),
        tokenizer,
        manifests=lambda wildcards: (
            manifests(wildcards, "main") if scales.load_probe(wildcards.scale).texts == "recorded" else []
        ),
    output:
        "results/{scale}/fidelity/{model}.parquet",
    params:
        plan=lambda wildcards: plan.digest(scales.load_probe(wildcards.scale)),
        manifests=lambda wildcards, input: ",".join(input.manifests),
    log:
        "results/{scale}/logs/fidelity-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.jobs.fidelity model={wildcards.model} probe={wildcards.scale} out={output} "
        "manifests=[{params.manifests}] threads={threads} > {log}"
