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
        json="results/{scale}/figures/{figure}.json",
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
    # One self-contained HTML page with every figure and table of a scale and of all records, claims, and some runs.
    input:
        "harness/report.html.j2",
        claims="results/{scale}/check.json",
        figures=lambda wildcards: [*figures(wildcards.scale, "png"), *measured_figures("png")],
        captions=lambda wildcards: captions(wildcards.scale),
        tables=lambda wildcards: [
            *[f"results/{wildcards.scale}/tables/{name}.json" for name in catalogue.tables(wildcards.scale)],
            *[f"results/device/tables/{name}.json" for name in measured_names(catalogue.TABLES)],
        ],
        checks=lambda wildcards: live_checks(scales.load_scale(wildcards.scale)),
        runs=lambda wildcards: drilled("results/{scale}/{experiment}/{model}/{dataset}", wildcards.scale),
        manifests=lambda wildcards: drilled(
            "results/{scale}/manifests/{experiment}/{model}/{dataset}.json", wildcards.scale
        ),
    output:
        "results/{scale}/report.html",
    params:
        code=code_digest("harness.report"),
        plan=lambda wildcards: plan.digest(scales.load_scale(wildcards.scale)),
        figures=listed("figures"),
        captions=listed("captions"),
        tables=listed("tables"),
        checks=listed("checks"),
        runs=listed("runs"),
        manifests=listed("manifests"),
    log:
        "results/{scale}/logs/page.log",
    conda:
        f"{workflow.basedir}/{ENVIRONMENT}"
    threads: 1
    shell:
        "logged {log} python -m harness.report scale={wildcards.scale} out={output} claims={input.claims} "
        "figures={params.figures} captions={params.captions} tables={params.tables} checks={params.checks} "
        "runs={params.runs} manifests={params.manifests}"
