# What was measured on a device is committed; here it becomes figures and a table.


rule device_figure:
    input:
        code("harness/device*.py", "harness/drawing.py", "harness/frames.py", "harness/scales.py"),
        "data/reference/{machine}/rounds.json",
        lambda wildcards: records(wildcards, "rounds_*.trace.json.gz", "families_*.json", "clock.json"),
    output:
        pdf="figures/device/{machine}_{figure}.pdf",
        png=report(
            "figures/device/{machine}_{figure}.png",
            caption="../captions/figure.rst",
            category="Figures",
            labels={"figure": "{machine} {figure}", "scale": "device"},
        ),
    log:
        "results/device/logs/figure-{machine}-{figure}.log",
    wildcard_constraints:
        figure="|".join(DEVICE_FIGURES),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.device {wildcards.figure} data/reference/{wildcards.machine} "
        "--out {output.pdf} {output.png} > {log}"


rule device_table:
    input:
        code("harness/device*.py", "harness/plotting/tables.py", "harness/frames.py", "harness/scales.py"),
        "data/reference/{machine}/rounds.json",
        lambda wildcards: records(wildcards, "families_*.json", "clock.json"),
    output:
        tex="paper_tables/device/{machine}_{table}.tex",
        md=report(
            "paper_tables/device/{machine}_{table}.md",
            caption="../captions/table.rst",
            category="Tables",
            labels={"table": "{machine} {table}", "scale": "device"},
        ),
        csv="paper_tables/device/{machine}_{table}.csv",
    log:
        "results/device/logs/table-{machine}-{table}.log",
    wildcard_constraints:
        table="|".join(DEVICE_TABLES),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.device_tables {wildcards.table} data/reference/{wildcards.machine} "
        "--out {output.tex} {output.md} {output.csv} > {log}"
