"""A run's lanes as Chrome-trace JSON, for Perfetto or chrome://tracing.

Format: "Trace Event Format" (Google, 2016), JSON object form: complete events (ph X, microseconds with three decimals)
and thread names (ph M).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from specter.errors import SpecterError
from specter.files import write_whole

Lane = Literal["host", "compute", "link", "decode"]


class TraceOp(NamedTuple):
    """One span on a lane. `num_bytes`: device-memory bytes of compute, link bytes of a copy."""

    lane: Lane
    label: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    flops: int = 0
    stall_ns: int = 0  # waited just before the start for a copy


def chrome_trace(ops: Iterable[TraceOp], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as a JSON object; `metadata` (hardware, system, ...) is shown by Perfetto as trace info."""
    ops = list(ops)
    shown = [lane for lane in get_args(Lane) if lane != "decode" or any(op.lane == lane for op in ops)]
    threads = {lane: index for index, lane in enumerate(shown, start=1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "specter"}}]
    for lane, thread in threads.items():
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for op in ops:
        counts = {"bytes": op.num_bytes, "flops": op.flops, "stall_ns": op.stall_ns}
        events.append(
            {"ph": "X", "pid": 1, "tid": threads[op.lane], "name": op.label, "cat": op.lane,
             "ts": op.start_ns / 1000, "dur": (op.end_ns - op.start_ns) / 1000,
             "args": {key: value for key, value in counts.items() if value}}
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(metadata)}


def write_chrome_trace(path: Path, ops: Iterable[TraceOp], metadata: Mapping[str, Any]) -> None:
    """Writes the trace to `path`, compressed if it ends in `.gz`; the same ops give the same bytes.

    Raises:
        SpecterError: the path cannot be written.
    """
    try:
        text = json.dumps(chrome_trace(ops, metadata), separators=(",", ":")) + "\n"
        write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise SpecterError(f"cannot write the trace {path}: {error.strerror}", "give a writable path") from None
