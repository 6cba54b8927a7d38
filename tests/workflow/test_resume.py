"""A killed recording is resumed, and loses nothing that was finished."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import yaml

from specter.models.spec import ModelSpec
from tests.helpers import TINY, open_live, quantize, write_directory, write_random
from tests.workflow.conftest import ROOT, Checkout, environment

SPEC: ModelSpec = dataclasses.replace(TINY, vocab=8192)  # the shipped tokenizer's
MANIFEST = "results/tiny/manifests/main/tiny/gsm8k.json"


def add_tiny_scale(root: Path) -> None:
    """A random model with its draft, and a scale that runs it."""
    write_random(root / "tiny", SPEC)
    live = open_live(root / "tiny")
    (root / "int4").mkdir()
    write_directory(root / "int4", quantize(SPEC, live.store), SPEC, 128)
    model = {
        "name": "tiny",
        "checkpoint": "tiny",
        "checkpoint_kind": "standin",
        "quantized": "int4",
        "charged_as": "itself",
        "tokenizer": "data/standins/tokenizer.json",
        "residents": {"high": 4, "low": 2},
    }
    scale = yaml.safe_load((ROOT / "conf/scale/smoke.yaml").read_text())
    scale |= {"name": "tiny", "models": ["tiny"], "experiments": ["main"], "max_inputs": 5, "max_new_tokens": 64}
    (root / "conf/model/tiny.yaml").write_text(yaml.safe_dump(model))
    (root / "conf/scale/tiny.yaml").write_text(yaml.safe_dump(scale))


def recordings(root: Path) -> dict[str, int]:
    """Finished recordings with their times of writing."""
    paths = root.glob("results/tiny/recordings/tiny/*/*.safetensors")
    return {path.name: path.stat().st_mtime_ns for path in paths if "-" not in path.name}


def test_a_killed_run_resumes(checkout: Checkout) -> None:
    add_tiny_scale(checkout.root)
    log = checkout.root / "killed.log"
    with log.open("w") as output:
        killed = subprocess.Popen(
            checkout.command(MANIFEST),
            cwd=checkout.root,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    while len(recordings(checkout.root)) < 3 and time.monotonic() < deadline:
        assert killed.poll() is None, log.read_text()[-4000:]
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    finished = recordings(checkout.root)
    assert len(finished) >= 3
    assert not (checkout.root / MANIFEST).exists()

    checkout.snakemake(MANIFEST)
    resumed = recordings(checkout.root)
    assert len(resumed) > len(finished)
    assert finished.items() <= resumed.items(), "a finished recording was made again"
    assert len(yaml.safe_load((checkout.root / MANIFEST).read_text())["recordings"]) == 40
