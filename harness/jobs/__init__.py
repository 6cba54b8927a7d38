"""What the jobs of the workflow share: progress with an estimated end, tables, and the options of one experiment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import Progress

from specter.config import ModelConfig
from specter.files import replacing
from specter.progress import make_progress

if TYPE_CHECKING:
    import pandas as pd

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of a job of one experiment on one model and data set, at a scale."""

    scale: str
    experiment: str
    model: str
    dataset: str


def progress_bar() -> Progress:
    """A bar on standard error, drawn on a terminal only."""
    console = Console(stderr=True)
    return make_progress(console, disable=not console.is_terminal)


def steps(items: Sequence[Item], description: str, progress: Progress) -> Iterator[Item]:
    """Yields `items` under a progress bar; without a terminal, a line every few seconds instead."""
    start = last = time.monotonic()
    task = progress.add_task(description, total=len(items))
    for done, item in enumerate(items):
        now = time.monotonic()
        if progress.disable and done and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = (now - start) / done * (len(items) - done)
            print(f"{description}: {done}/{len(items)}, about {left:.0f} s left", file=sys.stderr, flush=True)
        yield item
        progress.advance(task)


def model_columns(model: ModelConfig) -> dict[str, str]:
    """The columns that name a model in every table."""
    return {"model": model.name, "checkpoint_kind": model.checkpoint_kind, "charged_as": model.charged_as}


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Writes a parquet file, atomically."""
    with replacing(path) as part:
        frame.to_parquet(part, index=False)
