"""Runs systems of an experiment live, and compares their records with the replays', byte for byte.

Over the first two models every system runs under every sampling; of later models a third of the systems run.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.jobs import progress_bar, steps
from specter.arguments import run_command
from specter.config import SamplingConfig, read_values
from specter.errors import SpecterError
from specter.files import write_json
from specter.models.cpu.live import LiveModel
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.resolve import resolve
from specter.results import read_config, write_run

COMPARED = ("rounds.jsonl", "metrics.json")
SHARED = 6  # systems that follow each other run on texts of one place, so that several share its plain decoding
LATER_ONE_IN = 3  # systems of models after the samplings' turns


@dataclass(frozen=True)
class Options:
    """Repeats runs live."""

    replays: tuple[Path, ...]  # directories of runs
    out: Path
    turn: int = 0  # of the model: with another one, systems are repeated under other samplings


def choose(runs: Mapping[Path, Mapping[str, Any]], turn: int = 0) -> list[Path]:
    """A run of a system each, with samplings in turn, spread over data sets, inputs, budgets and policies.

    Args:
        runs: directories, and the values of their configurations.
        turn: see `Options`.
    """
    label = {path: SamplingConfig(**one["sampling"]).label for path, one in runs.items()}
    samplings = sorted(set(label.values()))
    systems = sorted({values["system"]["name"] for values in runs.values()})
    chosen = []
    for number, system in enumerate(systems):
        if turn >= len(samplings) and (number + turn) % LATER_ONE_IN:
            continue
        wanted = system, samplings[(number + turn) % len(samplings)]
        mine = [path for path, one in runs.items() if (one["system"]["name"], label[path]) == wanted]
        mine.sort(key=lambda path: (path.parent.name, path.name))
        chosen.append(mine[number // SHARED * SHARED * len(mine) // len(systems)])
    return chosen


def fits(directory: Path) -> bool:
    """Whether a run's system fitted, so that there is something to repeat."""
    return bool(json.loads((directory / "metrics.json").read_text())["fits_budget"])


def main(options: Options) -> None:
    runs = [path for replay in options.replays for path in sorted(replay.iterdir()) if path.is_dir()]
    chosen = choose({path: read_values(path / "config.yaml") for path in runs if fits(path)}, options.turn)
    configs = [read_config(path) for path in chosen]
    most = max(
        configs, key=lambda config: (config.decodes, config.system.speculative)
    )  # of what a model is loaded with
    torch.set_num_threads(most.threads)
    tokenizer = load_tokenizer(most)
    with progress_bar() as progress, tempfile.TemporaryDirectory() as scratch:
        model = LiveModel.load(resolve(most), progress)
        plain: dict[tuple[Any, ...], list[int]] = {}
        for path, config in steps(list(zip(chosen, configs, strict=True)), "live check", progress):
            prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
            run = resolve(config)
            result = model.run(run, prompt, warmup)
            text = tuple(prompt), dataclasses.astuple(config.sampling)
            if text not in plain:
                plain[text] = model.plain_tokens(run, prompt)
            result.metrics["agrees_with_plain"] = result.generation.tokens == plain[text]
            live = Path(scratch) / path.name
            write_run(live, config, result, model.notes)
            for name in COMPARED:
                if (live / name).read_bytes() != (path / name).read_bytes():
                    raise SpecterError(
                        f"{path / name} differs from a live run of the same configuration",
                        "delete results/*/recordings and run again; if it still differs, report it",
                    )
    write_json(options.out, {"identical": [str(path) for path in chosen], "compared": list(COMPARED)})
    print(f"{len(chosen)} of {len(runs)} runs repeated live: identical {' and '.join(COMPARED)}")


if __name__ == "__main__":
    run_command(main, Options)
