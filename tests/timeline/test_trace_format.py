"""A trace as Perfetto reads it, written out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from specter.timeline.base import Work
from specter.timeline.trace import TraceOp, chrome_trace, write_chrome_trace
from specter.timeline.virtual import VirtualTimeline
from tests.timeline.test_virtual import ROUND_NUMBERS

OPS = [
    TraceOp("compute", "experts", 1500, 4750, num_bytes=64, flops=8, stall_ns=20),
    TraceOp("link", "fetch L0 E1", 0, 1, num_bytes=192),
    TraceOp("host", "wait", 5, 5),
]
EVENTS = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "specter"}},
    {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "host"}},
    {"ph": "M", "pid": 1, "tid": 1, "name": "thread_sort_index", "args": {"sort_index": 1}},
    {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "M", "pid": 1, "tid": 2, "name": "thread_sort_index", "args": {"sort_index": 2}},
    {"ph": "M", "pid": 1, "tid": 3, "name": "thread_name", "args": {"name": "link"}},
    {"ph": "M", "pid": 1, "tid": 3, "name": "thread_sort_index", "args": {"sort_index": 3}},
    {
        "ph": "X", "pid": 1, "tid": 2, "name": "experts", "cat": "compute", "ts": 1.5, "dur": 3.25,
        "args": {"bytes": 64, "flops": 8, "stall_ns": 20},
    },
    {
        "ph": "X", "pid": 1, "tid": 3, "name": "fetch L0 E1", "cat": "link", "ts": 0.0, "dur": 0.001,
        "args": {"bytes": 192},
    },
    {"ph": "X", "pid": 1, "tid": 1, "name": "wait", "cat": "host", "ts": 0.005, "dur": 0.0, "args": {}},
]  # fmt: skip


def test_every_event_of_a_trace() -> None:
    trace = chrome_trace(OPS, {"system": "lru"})
    assert trace == {"traceEvents": EVENTS, "displayTimeUnit": "ns", "otherData": {"system": "lru"}}


def test_a_trace_is_one_line_of_json_and_compressed_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "for it"
    for name in ("trace.json", "trace.json.gz"):
        write_chrome_trace(directory / name, OPS, {})
    text = (directory / "trace.json").read_text()
    assert text.count("\n") == 1 and text.endswith("}\n") and ", " not in text
    assert json.loads(text)["traceEvents"] == EVENTS
    packed = (directory / "trace.json.gz").read_bytes()
    assert gzip.decompress(packed).decode() == text
    assert packed[4:8] == bytes(4), "no time of writing: the same run gives the same bytes"


def test_every_span_that_the_virtual_clock_traces() -> None:
    """A launch takes 5 ns, a copy 10 ns and its bytes, a byte of device memory half a nanosecond, a sync 20 ns."""
    timeline = VirtualTimeline(ROUND_NUMBERS, trace=True)
    copy = timeline.copy(90, lambda: None, label="fetch")
    unnamed = timeline.copy(90, lambda: None)
    _, done = timeline.compute(Work("wave", 58, 4, kernels=1, launches=2), lambda: None, [copy])
    timeline.wait_first([done, unnamed])
    timeline.wait_first([done, unnamed])  # has happened: no span
    timeline.wait(done)
    timeline.wait_first([copy])  # has happened long ago: the host does not go back
    assert timeline.now_ns() == 155
    assert timeline.ops == [
        TraceOp("host", "launch fetch", 0, 5),
        TraceOp("link", "fetch", 5, 105, 90),
        TraceOp("host", "launch copy", 5, 10),
        TraceOp("link", "copy", 105, 205, 90),
        TraceOp("host", "launch wave", 10, 20),
        TraceOp("compute", "wave", 105, 135, 58, 4, 85),
        TraceOp("host", "wait first", 20, 135),
        TraceOp("host", "wait", 135, 155),
    ]
