"""A new experiment with a figure and a table: conf/experiment/x.yaml, harness/studies/x.py, its name in a scale."""

from __future__ import annotations

import subprocess
import sys

import yaml

from tests.workflow.conftest import Checkout, environment
from tests.workflow.made_up import runs

STUDY = '''
"""TPOT of LRU, a toy."""

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames, macro
from harness.plotting.tables import Table, run_table
from harness.studies.registry import figure, table


def toy_data(frames: Frames) -> pd.DataFrame:
    return pd.DataFrame({"tpot_ms": [macro(frames["toy"], "tpot_ms")]})


@figure("toy", "toy", data=toy_data, footer=lambda frames: notes.run_notes(frames["toy"]), about="a toy")
def draw_toy(data: pd.DataFrame) -> Grid:
    grid = Grid(data, height=2.0)
    grid.axes[0][0].bar([0], data["tpot_ms"])
    return grid


@table("toy", "toy")
def toy_table(frames: Frames) -> Table:
    return run_table("Toy", toy_data(frames), 0, "A toy.", frames["toy"])
'''


def test_a_new_experiment_is_two_files_and_its_name_in_a_scale(checkout: Checkout) -> None:
    checkout.own_code()
    experiment = yaml.safe_load((checkout.root / "conf/experiment/budget_sweep.yaml").read_text())
    (checkout.root / "conf/experiment/toy.yaml").write_text(yaml.safe_dump(experiment | {"name": "toy"}))
    (checkout.root / "harness/studies/toy.py").write_text(STUDY)
    scale = checkout.root / "conf/scale/smoke.yaml"
    values = yaml.safe_load(scale.read_text())
    scale.write_text(yaml.safe_dump(values | {"experiments": [*values["experiments"], "toy"]}))
    planned = checkout.snakemake("-n", "--", "smoke")
    for path in ("figures/smoke/toy.png", "paper_tables/smoke/toy.csv", "results/smoke/toy/deepseek_v2_lite/gsm8k"):
        assert path in planned

    runs(("lru", "specter")).to_parquet(checkout.root / "toy.parquet")
    for kind, out in (("figure", "toy.png"), ("table", "toy.md")):
        command = [sys.executable, "-m", "harness.jobs.draw", f"{kind}=toy", f"out={out}", "tidy=toy.parquet"]
        subprocess.run(command, cwd=checkout.root, env=environment(), check=True)
    assert (checkout.root / "toy.png").stat().st_size > 5000 and "### Toy" in (checkout.root / "toy.md").read_text()
