"""Chrome traces: the lanes as named threads, every span, the same bytes each time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from specter.errors import SpecterError
from specter.timeline.base import Work
from specter.timeline.hardware import Hardware
from specter.timeline.trace import TraceOp, write_chrome_trace
from specter.timeline.virtual import VirtualTimeline
from specter.typed import load_typed

A100 = Path(__file__).parents[2] / "conf" / "hardware" / "a100_40gb_pcie4.yaml"
WORK = Work("experts", hbm_bytes=1_234_567, flops=89, kernels=2, launches=2)


def play(trace: bool) -> VirtualTimeline:
    timeline = VirtualTimeline(load_typed(Hardware, A100), trace=trace)
    payload = timeline.copy(1_000_001, lambda: None, label="L3 E7")
    for _ in range(3):
        _, end = timeline.compute(WORK, lambda: None, [payload])
        payload = timeline.copy(500, lambda: None)
    timeline.wait(end)
    return timeline


def test_written_trace(tmp_path: Path) -> None:
    timeline = play(trace=True)
    assert timeline.ops is not None
    path = tmp_path / "deep" / "trace.json"
    write_chrome_trace(path, timeline.ops, {"hardware": "a100"})
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"hardware": "a100"}
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "host", "link"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [names[span["tid"]] for span in spans].count("link") == 4
    first = next(span for span in spans if names[span["tid"]] == "link")
    assert first["name"] == "L3 E7" and first["args"] == {"bytes": 1_000_001}
    assert (first["ts"], first["dur"]) == (8.8, 44.567)  # 8800 ns; 2900 + ceil(1000001 / 24) ns
    stalled = next(span for span in spans if names[span["tid"]] == "compute")
    assert stalled["args"]["bytes"] == 1_234_567 and stalled["args"]["stall_ns"] == 53_367 - 26_400
    for lane in names:
        ends = [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["tid"] == lane]
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(ends))


def test_same_run_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_chrome_trace(tmp_path / name, play(trace=True).ops or (), {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tracing_changes_no_time() -> None:
    plain, traced = play(trace=False), play(trace=True)
    assert plain.ops is None
    assert (plain.now_ns(), plain.totals()) == (traced.now_ns(), traced.totals())


def test_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecterError, match="cannot write the trace"):
        write_chrome_trace(tmp_path / "file" / "trace.json", [TraceOp("host", "wait", 0, 1)], {})
