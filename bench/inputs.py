"""What a bench of the full-size runtime is given on the command line, and how its sections run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from bench.agreement import load_prompts
from bench.report import Report
from specter import provenance
from specter.errors import SpecterError
from specter.files import files_digest
from specter.models.cuda.full_size import FullSize, load_full_size
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import Pin
from specter.models.full_size import FULL_SIZE


@dataclass(frozen=True)
class Inputs:
    """Options that every such bench has."""

    checkpoint: Path = Path("data/standins/deepseek_v2_lite")  # the narrow stand-in
    quantized: Path = Path("results/quantized/deepseek_v2_lite/gptq")  # its INT4 experts
    tokenizer: Path = Path("data/standins/tokenizer.json")
    prompts: Path = Path("data/prompts")
    commit: str = ""  # of the code, where there is no git
    pin: str = "require"  # or prefer, off: see specter/models/cuda/store.py

    def check(self) -> None:
        """Raises SpecterError for a value that no type can refuse."""
        if self.pin not in get_args(Pin):
            raise SpecterError(f"pin={self.pin} is unknown", "use pin=require, pin=prefer or pin=off")

    def load_prompts(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        """Prompts from the data sets that experiments run on, as many from each. Raises SpecterError for too few."""
        files = [path for path in self.prompts.glob("*.jsonl") if path.stem != "heldout"]
        return load_prompts(files, self.tokenizer, num_prompts, num_tokens)

    def load(self, budget: DeviceBudget, console: Console) -> FullSize:
        """The model at full size. Raises SpecterError as `load_full_size`."""
        return load_full_size(
            self.checkpoint, self.quantized, FULL_SIZE["deepseek_v2_lite"], budget, cast(Pin, self.pin), console
        )

    def report(self, out: Path, full: FullSize, budget: DeviceBudget) -> Report:
        """An empty report that says what runs on what."""
        inputs = {
            "model": f"{full.spec.name}, inflated from {full.checkpoint.spec.name} (tiled, BF16)",
            "checkpoint_sha256": full.checkpoint.digest(),
            "int4": f"{full.codes.method}, tiled",
            "int4_sha256": files_digest(self.quantized, "*.safetensors", "*config.json"),
            "pin": self.pin,
        }
        return Report(out, provenance.of_device(budget.device, self.commit, **inputs))


def run_section(name: str, measure: Callable[[], None], report: Report, console: Console) -> None:
    """Runs one section and writes the report; a failure is named in it, and must not cost the others' results."""
    begin = time.perf_counter()
    try:
        measure()
    except Exception as error:
        report.skipped[name] = f"FAILED: {type(error).__name__}: {error}"
        console.print_exception()
    report.facts[f"seconds: {name}"] = round(time.perf_counter() - begin, 1)
    report.write()
