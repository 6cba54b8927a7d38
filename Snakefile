# The artifact as one graph: quantize -> probe -> record -> replay -> live_check -> tidy -> figures, tables, report.
#
#   snakemake --cores 1 all                          scale laptop (the default)
#   snakemake --cores 1 --config scale=paper -- all     another scale
#   snakemake --cores 1 smoke                        every stage once, for CI
#   snakemake --cores 1 check                        claims.yaml beside what was measured
import re
import sys
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

sys.path.insert(0, workflow.basedir)

from harness import catalogue, plan, scales
from harness.claims import load_claims, record_files, tidy_sources
from harness.plotting import titles
from harness.validation import check_all
from specter.errors import SpecterError
from specter.sources import code_digest

min_version("9.0")
# Jobs run under the interpreter that runs Snakemake, whether or not its environment is activated. `logged FILE COMMAND`
# writes output and errors of a job to its log, and shows its errors and progress as they come.
shell.prefix(
    f"set -euo pipefail; PATH={quote(str(Path(sys.executable).parent))}:$PATH; "
    'logged() {{ local log=$1; shift; : > "$log"; "$@" 2>&1 >> "$log" | tee -a "$log" >&2; }}; '
)

ENVIRONMENT = "environment.yml"  # used with --sdm conda only; `make` builds .venv from requirements.lock instead
SCALES = [path.stem for path in sorted((scales.CONF / "scale").glob("*.yaml"))]

try:
    check_all()
    SCALE = scales.load_scale(config.get("scale", "laptop"))
    CLAIMS = load_claims()
except SpecterError as error:
    raise WorkflowError(str(error)) from None

print(
    f"Scale {SCALE.name}: {SCALE.about}. Others: snakemake --config scale=NAME, NAME one of {', '.join(SCALES)}.",
    file=sys.stderr,
)


wildcard_constraints:
    scale="|".join(SCALES),
    experiment="[a-z0-9_]+",
    model="[a-z0-9_]+",
    dataset="[a-z0-9_]+",


include: "rules/common.smk"
include: "rules/models.smk"
include: "rules/runs.smk"
include: "rules/paper.smk"
include: "rules/device.smk"
include: "rules/check.smk"


localrules:
    all,
    smoke,


rule all:
    default_target: True
    input:
        deliverables(SCALE.name),


rule smoke:
    input:
        deliverables("smoke"),
