"""What every job of the workflow shares: one-screen errors, progress with an estimated end, whole files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from specter.errors import SpecterError
from specter.progress import make_progress

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 15.0


def run_job(main: Callable[[], None]) -> None:
    """Runs a job's `main`; bad input ends it with one screen of text instead of a traceback."""
    try:
        main()
    except SpecterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def progress_bar() -> Progress:
    """A bar on standard error, shown on a terminal only (standard output goes to the rule's log)."""
    console = Console(stderr=True)
    return make_progress(console, disable=not console.is_terminal)


def steps(items: Sequence[Item], description: str, progress: Progress) -> Iterator[Item]:
    """Yields `items` under a progress bar; where there is no terminal, a line every few seconds instead."""
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
