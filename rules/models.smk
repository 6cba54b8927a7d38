# From a checkpoint to a draft, and how well the draft predicts the target.


rule preflight:
    # Refuses a scale that this machine cannot run, before anything large starts.
    output:
        "results/{scale}/preflight.json",
    priority: 100  # `quantize` has no scale, and would otherwise run before it
    params:
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
        code=code_digest("harness.jobs.preflight"),
    log:
        "results/{scale}/logs/preflight.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.preflight scale={wildcards.scale} out={output}"


rule quantize:
    # INT4 experts as an AutoGPTQ directory, one for all scales: the draft by GPTQ; for the fidelity study by AWQ, for
    # which a quarter of the calibration text is enough. A killed job resumes after its last finished layer.
    input:
        checkpoint,
        "data/standins/calibration.safetensors",
    output:
        directory("results/quantized/{model}/{method}"),
    params:
        checkpoint=lambda wildcards: model_config(wildcards).checkpoint,
        tokenizer=lambda wildcards: model_config(wildcards).tokenizer,
        sequences=lambda wildcards: 64 if wildcards.method == "awq" else 0,
        device=lambda wildcards: "cuda" if model_config(wildcards).checkpoint_kind == "hub" else "cpu",
        code=code_digest("specter.quantize"),
    log:
        "results/quantized/logs/{model}-{method}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m specter.quantize checkpoint={params.checkpoint:q} out={output} method={wildcards.method} "
        "tokenizer={params.tokenizer:q} group=128 sequences={params.sequences} device={params.device} threads={threads}"


rule residual:
    # The experts as residual of their INT4 codes, beside the draft, for systems on codec=residual. Seconds for a
    # stand-in on one core. A killed job resumes after its last finished layer.
    input:
        checkpoint,
        "results/quantized/{model}/{method}",
    output:
        directory("results/residual/{model}/{method}"),
    params:
        checkpoint=lambda wildcards: model_config(wildcards).checkpoint,
        device=lambda wildcards: "cuda" if model_config(wildcards).checkpoint_kind == "hub" else "cpu",
        code=code_digest("specter.quantize.residual"),
    log:
        "results/residual/logs/{model}-{method}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m specter.quantize.residual encode checkpoint={params.checkpoint:q} "
        "quantized=results/quantized/{wildcards.model}/{wildcards.method} out={output} device={params.device} "
        "threads={threads}"


rule probe:
    # Routing fidelity, acceptance and expert union: from the recordings, and teacher-forced on held-out text.
    input:
        checkpoint,
        quantized,
        "data/prompts/heldout.jsonl",
        tokenizer,
        manifests=lambda wildcards: manifests(wildcards, "main"),
    output:
        "results/{scale}/probe/{model}.parquet",
    params:
        plan=lambda wildcards: plan.digest(plan.probe_plan(**wildcards)),
        code=code_digest("harness.jobs.probe", "baselines"),
        manifests=listed("manifests"),
    log:
        "results/{scale}/logs/probe-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.probe scale={wildcards.scale} model={wildcards.model} "
        "manifests={params.manifests} out={output}"


rule fidelity:
    # Agreement of each method's and precision's routing with the target's, teacher-forced on recorded texts or on data sets.
    input:
        checkpoint,
        studied,
        tokenizer,
        manifests=lambda wildcards: (
            manifests(wildcards, "main") if scales.load_probe(wildcards.scale).texts == "recorded" else []
        ),
    output:
        "results/{scale}/fidelity/{model}.parquet",
    params:
        plan=lambda wildcards: plan.digest(scales.load_probe(wildcards.scale)),
        code=code_digest("harness.jobs.fidelity"),
        manifests=listed("manifests"),
    log:
        "results/{scale}/logs/fidelity-{model}.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.fidelity model={wildcards.model} probe={wildcards.scale} out={output} "
        "manifests={params.manifests} threads={threads}"
