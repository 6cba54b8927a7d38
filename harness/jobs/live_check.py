"""Runs a sample of an experiment live and compares its records with the replays', byte for byte."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.jobs import progress_bar, steps
from specter.arguments import run_command
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.files import write_json
from specter.models.cpu.live import LiveModel
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.resolve import resolve
from specter.results import read_config, write_run

COMPARED = ("rounds.jsonl", "metrics.json")


@dataclass(frozen=True)
class Options:
    """Repeats a sample of replayed runs live."""

    replays: tuple[Path, ...]  # directories of runs
    num_checks: int
    out: Path


def sample(directories: list[Path], num_checks: int) -> list[Path]:
    """`num_checks` runs, evenly spread over all runs in an order that mixes data sets, systems and budgets."""
    ordered = sorted(directories, key=lambda path: (path.name, path.parent.name))
    step = max(1, len(ordered) // num_checks)
    return ordered[step // 2 :: step][:num_checks]


def choose(runs: dict[Path, RunConfig], num_checks: int) -> list[Path]:
    """A sample of runs with a finite budget, so that experts are evicted; half of them prefetch."""
    bounded = {path: config for path, config in runs.items() if not config.system.holds_all}
    planned = [path for path, config in bounded.items() if config.system.planner != "none"]
    others = [path for path in bounded if path not in set(planned)]
    return sample(planned, num_checks - num_checks // 2) + sample(others, num_checks // 2)


def main(options: Options) -> None:
    runs = [path for replay in options.replays for path in sorted(replay.iterdir()) if path.is_dir()]
    chosen = choose({path: read_config(path) for path in runs}, options.num_checks)
    configs = [read_config(path) for path in chosen]
    drafting = next((config for config in configs if config.system.speculative), configs[0])
    torch.set_num_threads(drafting.threads)
    tokenizer = load_tokenizer(drafting)
    with progress_bar() as progress, tempfile.TemporaryDirectory() as scratch:
        model = LiveModel.load(resolve(drafting), progress)
        for path, config in steps(list(zip(chosen, configs, strict=True)), "live check", progress):
            prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
            run = resolve(config)
            result = model.run(run, prompt, warmup)
            result.metrics["agrees_with_plain"] = model.agrees_with_plain(run, result)
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
