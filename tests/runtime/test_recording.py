"""A replay from a file equals the live run: same rounds, same tokens, for any system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.errors import SpecterError
from specter.recording import DENSE, Recording, RecordingModel, ReplayModel
from specter.records import Generation
from specter.speculation.accept import FirstToken
from specter.speculation.depth import Depth
from tests.runtime.fakes import TINY, FakeModel, make_engine
from tests.runtime.test_engine import PROMPT, sometimes


def record(draft_len: int, num_slots: int = 12, **policy: Any) -> tuple[Generation, Recording]:
    fake = FakeModel(sometimes)
    engine = make_engine(fake, num_slots, draft_len, **policy)
    engine.model = recorder = RecordingModel(fake)
    generation = engine.generate(PROMPT, 30)
    return generation, recorder.finish(generation, {"made": "in a test"})


class Listed(Depth):
    """Drafts as many tokens as a list says."""

    def __init__(self, lens: list[int]) -> None:
        super().__init__(max(lens))
        self._lens = iter(lens)

    def choose(self, limit: int, present: Any) -> int:
        return min(next(self._lens), limit)


def dense(draft_len: int) -> Recording:
    fake = FakeModel(sometimes)
    engine = make_engine(fake, 12, draft_len)
    engine.model, engine.sampler = RecordingModel(fake), FirstToken(engine.sampler)
    return engine.model.finish(engine.generate(PROMPT, 30), {DENSE: "every position"})


def replay(recording: Recording, draft_len: int, num_slots: int = 12, **policy: Any) -> Generation:
    engine = make_engine(FakeModel(), num_slots, draft_len, **policy)
    engine.model = ReplayModel([recording], TINY.num_dense_layers, TINY.num_experts)
    return engine.generate(recording.prompt, 30)


@pytest.mark.parametrize("draft_len", [0, 1, 4, 16])
def test_replay_from_a_file_equals_the_live_run(tmp_path: Path, draft_len: int) -> None:
    generation, recording = record(draft_len)
    recording.save(tmp_path / "run.safetensors")
    loaded = Recording.load(tmp_path / "run.safetensors")
    assert loaded.meta == {"made": "in a test"}
    assert loaded.tokens == generation.tokens
    assert replay(loaded, draft_len) == generation


@pytest.mark.parametrize(("num_slots", "eviction"), [(2, "lru"), (6, "drop"), (24, "lru")])
def test_one_recording_serves_every_budget_and_policy(num_slots: int, eviction: str) -> None:
    _, recording = record(4)
    live, _ = record(4, num_slots, eviction=eviction, planner="none")
    assert replay(recording, 4, num_slots, eviction=eviction, planner="none") == live


@pytest.mark.parametrize("draft_len", [0, 1, 4, 16])
def test_a_dense_recording_serves_every_depth(tmp_path: Path, draft_len: int) -> None:
    live, recording = record(draft_len)
    path = tmp_path / "dense.safetensors"
    dense(16).save(path)
    loaded = Recording.load(path)
    assert loaded.is_dense and loaded.tokens == recording.tokens
    assert replay(loaded, draft_len) == live


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 16), min_size=30, max_size=30))
def test_a_dense_recording_serves_any_sequence_of_depths(lens: list[int]) -> None:
    fake = FakeModel(sometimes)
    live = make_engine(fake, 12, 1, depth=Listed(lens))
    live.model = recorder = RecordingModel(fake)
    generation = live.generate(PROMPT, 30)
    model = ReplayModel([dense(16)], TINY.num_dense_layers, TINY.num_experts)
    engine = make_engine(FakeModel(), 12, 1, depth=Listed(lens))
    engine.model = model
    assert engine.generate(PROMPT, 30) == generation
    assert [one.tokens for one in model.played] == [one.tokens for one in recorder.finish(generation, {}).passes]


@pytest.mark.parametrize("draft_len", [0, 4])
@pytest.mark.parametrize("stop", range(10))
def test_a_recording_that_went_on_replays_to_a_stop_token(stop: int, draft_len: int) -> None:
    live = make_engine(FakeModel(sometimes), 12, draft_len).generate(PROMPT, 30, stop_ids={stop})
    for recording in (dense(16), record(draft_len)[1]):
        engine = make_engine(FakeModel(), 12, draft_len)
        engine.model = ReplayModel([recording], TINY.num_dense_layers, TINY.num_experts)
        assert engine.generate(PROMPT, 30, stop_ids={stop}) == live


def test_a_dense_recording_refuses_a_longer_draft() -> None:
    with pytest.raises(SpecterError, match="not recorded: draft step 4"):
        replay(dense(4), 5)


def test_calls_that_were_not_recorded_are_refused() -> None:
    _, recording = record(4)
    with pytest.raises(SpecterError, match="not recorded: draft step 4"):
        replay(recording, 5)
    with pytest.raises(SpecterError, match="not recorded: a pass over 1 tokens"):
        replay(recording, 0)


@pytest.mark.parametrize("place", range(1, 9))
def test_a_flipped_bit_is_found(tmp_path: Path, place: int) -> None:
    _, recording = record(4)
    path = tmp_path / "run.safetensors"
    recording.save(path)
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")  # of the arrays
    content[begin + (len(content) - begin) * place // 9] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(SpecterError, match=r"run.safetensors is not a recording(?s:.*)checksum"):
        Recording.load(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    _, recording = record(4)
    path = tmp_path / "run.safetensors"
    recording.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecterError, match="run.safetensors is not a recording"):
        Recording.load(path)
