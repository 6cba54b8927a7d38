# Figures and tables of what was measured on a device and committed in data/reference/<machine>.


rule device_figure:
    input:
        "harness/plotting/specter.mplstyle",
        tidy=lambda wildcards: device_records(wildcards.machine, catalogue.FIGURES[f"device.{wildcards.figure}"]),
    output:
        pdf="figures/device/{machine}_{figure}.pdf",
        png=report(
            "figures/device/{machine}_{figure}.png",
            caption="../captions/figure.rst",
            category="Figures",
            labels={"figure": "{machine} {figure}", "scale": "device"},
        ),
        json="results/device/figures/{machine}_{figure}.json",
    params:
        code=lambda wildcards: code_digest("harness.plotting", catalogue.FIGURES[f"device.{wildcards.figure}"].module),
        labels=plan.digest(titles.labels()),
        out=listed_output,
        tidy=listed("tidy"),
    log:
        "results/device/logs/figure-{machine}-{figure}.log",
    wildcard_constraints:
        figure="|".join(catalogue.of_device(catalogue.FIGURES)),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.draw figure=device.{wildcards.figure} out={params.out} tidy={params.tidy}"


rule device_table:
    input:
        tidy=lambda wildcards: device_records(wildcards.machine, catalogue.TABLES[f"device.{wildcards.table}"]),
    output:
        tex="paper_tables/device/{machine}_{table}.tex",
        md=report(
            "paper_tables/device/{machine}_{table}.md",
            caption="../captions/table.rst",
            category="Tables",
            labels={"table": "{machine} {table}", "scale": "device"},
        ),
        csv="paper_tables/device/{machine}_{table}.csv",
        json="results/device/tables/{machine}_{table}.json",
    params:
        code=lambda wildcards: code_digest("harness.plotting", catalogue.TABLES[f"device.{wildcards.table}"].module),
        labels=plan.digest(titles.labels()),
        out=listed_output,
        tidy=listed("tidy"),
    log:
        "results/device/logs/table-{machine}-{table}.log",
    wildcard_constraints:
        table="|".join(catalogue.of_device(catalogue.TABLES)),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.draw table=device.{wildcards.table} out={params.out} tidy={params.tidy}"
