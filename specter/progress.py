"""Progress bars with an estimate of the time left, for whatever may take more than five seconds."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def make_progress(console: Console, disable: bool = False, auto_refresh: bool = True) -> Progress:
    """A bar with count, time passed and time left; nothing is drawn if `disable`.

    Args:
        auto_refresh: draw from a thread, which takes the interpreter from whoever is measured; else only when told.
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
