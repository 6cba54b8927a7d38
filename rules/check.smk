# Every claim of claims.yaml beside what was measured.


rule claims:
    # Verdicts on all claims. A claim that fails does not stop this rule, so that its outputs remain.
    input:
        "claims.yaml",
        tidy=lambda wildcards: tidied(wildcards.scale, checked_sources(wildcards.scale)),
        records=record_files(CLAIMS),
    output:
        table="results/{scale}/check.parquet",
        json="results/{scale}/check.json",
        md="results/{scale}/check.md",
    params:
        code=code_digest("harness.jobs.check"),
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
        labels=plan.digest(titles.labels()),
        out=listed_output,
        tidy=listed("tidy"),
        records=listed("records"),
    log:
        "results/{scale}/logs/check.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.check scale={wildcards.scale} out={params.out} tidy={params.tidy} "
        "records={params.records}"


rule check:
    # Fails if a claim does.
    input:
        f"results/{SCALE.name}/check.json",
    log:
        f"results/{SCALE.name}/logs/verdict.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.verdict checked={input}"
