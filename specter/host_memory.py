"""Host memory that a process may still use: the machine's, or less inside a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


def available_bytes(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be allocated now without swapping: of the machine, and of every group around this process."""
    return min([int(psutil.virtual_memory().available), *_left_of_groups(root, membership)])


def _left_of_groups(root: Path, membership: Path) -> Iterator[int]:
    """What each limit leaves. Page cache counts as free: the kernel drops it when a group needs memory."""
    for directory in _directories(root, membership):
        limit = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
        used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            yield max(limit - used + _page_cache(directory / "memory.stat"), 0)


def _directories(root: Path, membership: Path) -> Iterator[Path]:
    """The directories of the groups of this process, from the innermost outwards, of both versions."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        # Inside a container the path is often the host's, and only the top is mounted.
        yield from [group, *(parent for parent in group.parents if parent.is_relative_to(top))]


def _page_cache(stat: Path) -> int:
    try:
        entries = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get("inactive_file", entries.get("total_inactive_file", 0)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
