"""A new eviction, planner or baseline: one module, one system file, and for an experiment the system's name."""

from __future__ import annotations

import json
import subprocess
import sys

import yaml

from tests.workflow.conftest import Checkout, environment

FIFO = '''
"""First in, first out, a toy."""

from collections.abc import Callable

from specter.experts.policies.base import EVICTIONS, Eviction, Pool
from specter.models.spec import ExpertId


@EVICTIONS.register("toy_fifo")
class Fifo(Eviction):
    def __init__(self, pool: Pool) -> None:
        self._residents: list[ExpertId] = []

    def loaded(self, expert: ExpertId) -> None:
        self._residents.append(expert)

    def forget(self, expert: ExpertId) -> None:
        self._residents.remove(expert)

    def clear(self) -> None:
        self._residents.clear()

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        return next(filter(may_evict, self._residents), None)

    def order(self) -> list[ExpertId]:
        return list(self._residents)
'''
BASELINE = '''
"""`toy_baseline`: loads the first two experts of the next layer, whatever the router predicts, a toy."""

from collections.abc import Callable

import numpy as np

from specter.experts.policies.base import PREDICTORS, NextLayerPredictor, Plan
from specter.models.base import Routing
from specter.models.spec import ExpertId


@PREDICTORS.register("toy_first_two")
class FirstTwo(NextLayerPredictor):
    is_active = True

    def plan(self, layer: int, predicted: Routing, num_experts: int, is_present: Callable[[ExpertId], bool]) -> Plan:
        loads = [expert for expert in (ExpertId(layer, 0), ExpertId(layer, 1)) if not is_present(expert)]
        return Plan(loads, np.zeros((layer + 1, num_experts), np.bool_))
'''


def run_system(checkout: Checkout, system: str) -> dict[str, object]:
    """The metrics of a short live run."""
    command = [
        sys.executable, "-m", "specter.run", f"system={system}", "max_new_tokens=8", "warmup_tokens=4",
        "results=results/toy", "budget.experts_per_layer=6",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=checkout.root, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (checkout.root / "results/toy").glob(f"{system}-*/metrics.json")
    metrics: dict[str, object] = json.loads(path.read_text())
    return metrics


def test_an_eviction_is_one_module_and_one_system_file(checkout: Checkout) -> None:
    checkout.own_code()
    (checkout.root / "specter/experts/policies/toy_fifo.py").write_text(FIFO)
    (checkout.root / "conf/system/toy_fifo.yaml").write_text("name: toy_fifo\ntitle: FIFO\neviction: toy_fifo\n")
    assert run_system(checkout, "toy_fifo")["agrees_with_plain"] is True


def test_a_baseline_is_one_module_one_system_file_and_its_name_in_an_experiment(checkout: Checkout) -> None:
    checkout.own_code()
    (checkout.root / "baselines/toy.py").write_text(BASELINE)
    (checkout.root / "conf/system/toy_baseline.yaml").write_text(
        'name: toy_baseline\ntitle: Toy\ncolour: "#123456"\npredictor: toy_first_two\n'
    )
    metrics = run_system(checkout, "toy_baseline")
    assert metrics["agrees_with_plain"] is True and metrics["num_prefetched"]

    path = checkout.root / "conf/experiment/main.yaml"
    experiment = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(experiment | {"systems": [*experiment["systems"], "toy_baseline"]}))
    script = (
        "from harness.plan import experiment_runs; from harness.plotting.titles import styles\n"
        "runs = experiment_runs('smoke', 'main', 'deepseek_v2_lite', 'gsm8k')\n"
        "assert 'toy_baseline' in {run.system.name for run in runs}\n"
        "assert styles(['toy_baseline']) == {'toy_baseline': ('Toy', '#123456')}, styles(['toy_baseline'])"
    )
    subprocess.run([sys.executable, "-c", script], cwd=checkout.root, env=environment(), check=True)


def test_a_wrong_name_lists_what_is_registered(checkout: Checkout) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specter.run", "system.predictor=nxt_gate"],
        cwd=checkout.root, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    for name in ("none", "next_gate", "next_gate_2"):  # specter's own and those of `baselines`
        assert name in done.stderr
