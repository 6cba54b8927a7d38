# What people read.


rule figure:
    input:
        code(
            "harness/*figures.py",
            "harness/*tables.py",
            "harness/drawing.py",
            "harness/frames.py",
            "harness/published.py",
            "harness/*.mplstyle",
        ),
        tidy=lambda wildcards: tidied(wildcards.scale, scales.FIGURES[wildcards.figure.partition("-")[0]]),
    output:
        pdf="figures/{scale}/{figure}.pdf",
        png=report(
            "figures/{scale}/{figure}.png",
            caption="../captions/figure.rst",
            category="Figures",
            labels={"figure": "{figure}", "scale": "{scale}"},
        ),
    params:
        drawn=lambda wildcards: scales.drawn(wildcards.scale, wildcards.figure),
    log:
        "results/{scale}/logs/figure-{figure}.log",
    wildcard_constraints:
        figure=rf"({'|'.join(scales.FIGURES)})(-[a-z0-9_]+)?",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.figures {params.drawn} --out {output.pdf} {output.png} --tidy {input.tidy} > {log}"


rule table:
    input:
        code("harness/*tables.py", "harness/frames.py", "baselines/specmoeoff.py", "harness/published.py"),
        tidy=lambda wildcards: tidied(wildcards.scale, scales.TABLES[wildcards.table]),
    output:
        tex="paper_tables/{scale}/{table}.tex",
        md=report(
            "paper_tables/{scale}/{table}.md",
            caption="../captions/table.rst",
            category="Tables",
            labels={"table": "{table}", "scale": "{scale}"},
        ),
        csv="paper_tables/{scale}/{table}.csv",
    log:
        "results/{scale}/logs/table-{table}.log",
    wildcard_constraints:
        table="|".join(scales.TABLES),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.tables {wildcards.table} --out {output.tex} {output.md} {output.csv} "
        "--tidy {input.tidy} > {log}"


rule page:
    # One self-contained HTML page with every figure and table of a scale.
    input:
        code("harness/page.py", "harness/page.html.j2"),
        figures=lambda wildcards: figures(wildcards.scale, "png"),
        tables=lambda wildcards: tables(wildcards.scale, "md"),
        checks=lambda wildcards: live_checks(scales.load_scale(wildcards.scale)),
    output:
        "results/{scale}/report.html",
    params:
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
    log:
        "results/{scale}/logs/page.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "python -m harness.page --scale {wildcards.scale} --out {output} "
        "--figures {input.figures} --tables {input.tables} --checks {input.checks} > {log}"
