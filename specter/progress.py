"""Progress bars with an estimate of the remaining time."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def make_progress(console: Console, disable: bool = False, auto_refresh: bool = True) -> Progress:
    """A bar with count, elapsed and remaining time; nothing is drawn if `disable`.

    Args:
        auto_refresh: redraw from a thread. Off in timed runs, where the thread would compete for the interpreter.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
        auto_refresh=auto_refresh,
    )
