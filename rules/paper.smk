# Figures, tables and one page, from tidy tables.


rule figure:
    input:
        "harness/plotting/specter.mplstyle",
        tidy=lambda wildcards: tidied(wildcards.scale, figure_study(wildcards).sources),
    output:
        pdf="figures/{scale}/{figure}.pdf",
        png=report(
            "figures/{scale}/{figure}.png",
            caption="../captions/figure.rst",
            category="Figures",
            labels={"figure": "{figure}", "scale": "{scale}"},
        ),
    params:
        code=lambda wildcards: code_digest("harness.plotting", figure_study(wildcards).module),
        name=lambda wildcards: figure_study(wildcards).name,
        model=lambda wildcards: catalogue.figure_model(wildcards.scale, wildcards.figure),
        labels=plan.digest(titles.labels()),
        out=listed_output,
        tidy=listed("tidy"),
    log:
        "results/{scale}/logs/figure-{figure}.log",
    wildcard_constraints:
        figure=rf"({'|'.join(map(re.escape, catalogue.FIGURES.names()))})(-[a-z0-9_]+)?",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.draw figure={params.name} model={params.model} out={params.out} "
        "tidy={params.tidy}"


rule table:
    input:
        tidy=lambda wildcards: tidied(wildcards.scale, catalogue.TABLES[wildcards.table].sources),
    output:
        tex="paper_tables/{scale}/{table}.tex",
        md=report(
            "paper_tables/{scale}/{table}.md",
            caption="../captions/table.rst",
            category="Tables",
            labels={"table": "{table}", "scale": "{scale}"},
        ),
        csv="paper_tables/{scale}/{table}.csv",
        json="results/{scale}/tables/{table}.json",
    params:
        code=lambda wildcards: code_digest("harness.plotting", catalogue.TABLES[wildcards.table].module),
        labels=plan.digest(titles.labels()),
        out=listed_output,
        tidy=listed("tidy"),
    log:
        "results/{scale}/logs/table-{table}.log",
    wildcard_constraints:
        table="|".join(map(re.escape, catalogue.TABLES.names())),
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.jobs.draw table={wildcards.table} out={params.out} tidy={params.tidy}"


rule page:
    # One self-contained HTML page with every figure and table of a scale.
    input:
        "harness/report.html.j2",
        figures=lambda wildcards: figures(wildcards.scale, "png"),
        tables=lambda wildcards: [f"results/{wildcards.scale}/tables/{t}.json" for t in catalogue.tables(wildcards.scale)],
        checks=lambda wildcards: live_checks(scales.load_scale(wildcards.scale)),
    output:
        "results/{scale}/report.html",
    params:
        code=code_digest("harness.report"),
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
        figures=listed("figures"),
        tables=listed("tables"),
        checks=listed("checks"),
    log:
        "results/{scale}/logs/page.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.report scale={wildcards.scale} out={output} figures={params.figures} "
        "tables={params.tables} checks={params.checks}"
