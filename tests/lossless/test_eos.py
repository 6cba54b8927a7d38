"""With EOS honoured, every system's text is plain decoding's up to the first EOS; replays end there, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.jobs.record import texts
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.errors import SpecterError
from specter.models.cpu.live import LiveModel
from specter.resolve import resolve
from specter.session import Replayer
from specter.speculation.accept import through_stop
from specter.text.tokenizer import load_tokenizer
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.helpers import TINY, load_system, open_live, write_random

PROMPT, WARMUP, NUM_TOKENS = [96, 0, 44, 44, 44], [3, 1], 40
SYSTEMS = ("resident", "lru", "specter", "specter_deadline", "specmoeoff", "specter_auto")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> LiveModel:
    directory = tmp_path_factory.mktemp("tiny")
    write_random(directory, TINY, seed=1)
    opened = open_live(directory, num_slots=TINY.num_experts)
    return LiveModel(opened.decoder, opened.store, notes={"directory": str(directory)})


@pytest.fixture(scope="module")
def config(live: LiveModel) -> RunConfig:
    directory = live.notes["directory"]
    found = RunConfig(
        model=ModelConfig("tiny", directory, "standin", "", "itself", "", {"high": 4, "low": 1.5}),
        system=load_system("resident"),
        budget=BudgetConfig("low", policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig("seeded", temperature=0.9, seed=3),
        hardware=load_typed(Hardware, Path("conf/hardware/a100_40gb_pcie4.yaml")),
        max_new_tokens=NUM_TOKENS,
        warmup_tokens=5,
        k=7,
    )
    whole = live.run(resolve(found), PROMPT, WARMUP).generation.tokens
    eos = next(token for token in whole[12:30] if token not in whole[:12])
    (Path(directory) / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    return replace(found, ignore_eos=False)


@pytest.mark.parametrize("name", SYSTEMS)
def test_texts_end_at_the_same_eos_live_and_by_replay(live: LiveModel, config: RunConfig, name: str) -> None:
    run = resolve(replace(config, system=load_system(name)))
    whole = live.run(resolve(replace(run.config, ignore_eos=True)), PROMPT, WARMUP)
    found = live.run(run, PROMPT, WARMUP)
    tokens, metrics = found.generation.tokens, found.metrics
    assert tokens == through_stop(whole.generation.tokens, run.eos_ids) and 12 < len(tokens) < NUM_TOKENS
    assert live.agrees_with_plain(run, found)
    assert (metrics["stop_reason"], metrics["num_tokens_to_eos"]) == ("eos", len(tokens))
    assert whole.warmup is not None and found.warmup is not None
    assert found.warmup.tokens == whole.warmup.tokens and len(whole.warmup.tokens) == 5
    # What a run that went on notes about its text up to EOS is what the run that ended notes.
    others = whole.metrics
    assert (others["stop_reason"], others["num_tokens_to_eos"]) == ("length", len(tokens))
    assert others.get("acceptance_to_eos") == metrics.get("acceptance_to_eos") == metrics.get("acceptance")
    if name == "specter_auto":  # replays dense recordings, which are made one token a round
        return
    for recording in (whole.recording, found.recording):
        replayed = Replayer().replay(run, recording, whole.warmup)
        assert replayed.generation == found.generation and replayed.metrics == {
            key: metrics[key] for key in replayed.metrics
        }


def test_recordings_go_beyond_eos(config: RunConfig) -> None:
    shipped = replace(config, prompt="Hello", model=replace(config.model, tokenizer="data/standins/tokenizer.json"))
    tokenizer = load_tokenizer(Path(shipped.model.tokenizer))
    assert [text.config.ignore_eos for text in texts(shipped, tokenizer)] == [True, True]


def test_a_checkpoint_without_eos_is_refused_where_it_is_to_be_honoured(config: RunConfig, tmp_path: Path) -> None:
    write_random(tmp_path, TINY, seed=1)
    model = replace(config.model, checkpoint=str(tmp_path))
    assert resolve(replace(config, model=model, ignore_eos=True)).stop_ids == frozenset()
    with pytest.raises(SpecterError, match="eos_token_id"):
        resolve(replace(config, model=model))
