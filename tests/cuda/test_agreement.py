"""How the bench compares the full-size model with the narrow one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.agreement import (
    Behaviour,
    agreement,
    argmax_agreement,
    behave,
    expert_match,
    load_prompts,
    narrow_model,
    routing_agreement,
)
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from tests.helpers import TINY, open_live, quantize, run_pass, write_random

PROMPT = [3, 1, 4, 15, 92, 6, 53]


def test_the_narrow_model_says_what_the_decoder_says(tmp_path: Path) -> None:
    write_random(tmp_path)
    live = open_live(tmp_path)
    narrow = narrow_model(Checkpoint.open(tmp_path), quantize(TINY, live.store), capacity=32, tile=16)
    seen = behave(narrow, PROMPT, num_draft=3)
    expected = run_pass(live.decoder, live.store, PROMPT, 0)
    assert seen.tokens.tolist() == torch.stack(expected.outputs).argmax(-1).tolist()
    assert np.array_equal(seen.routing, np.stack(expected.routing, axis=1))
    steps = [live.decoder.draft_row(PROMPT[position], position) for position in (4, 5, 6)]
    assert seen.draft_tokens.tolist() == [int(step.output.argmax()) for step in steps]
    assert np.array_equal(seen.draft_routing, np.stack([step.routing for step in steps]))


def behaviour(
    tokens: list[int], routing: list[list[int]], draft: list[int], draft_routing: list[list[int]]
) -> Behaviour:
    return Behaviour(np.array(tokens), np.array(routing)[:, None], np.array(draft), np.array(draft_routing)[:, None])


def test_shares() -> None:
    one = behaviour([1, 2, 3], [[0, 1], [2, 3], [4, 5]], [2, 9], [[3, 2], [4, 0]])
    two = behaviour([1, 2, 7], [[1, 0], [2, 0], [4, 5]], [2, 7], [[2, 0], [4, 5]])
    assert (agreement([one]).acceptance, agreement([one]).draft_match) == (0.5, 0.75)
    assert agreement([one, two]).acceptance == 0.75 and agreement([one, two]).num_draft_tokens == 4
    assert argmax_agreement([one], [two]) == pytest.approx(2 / 3)
    assert routing_agreement([one], [two]) == pytest.approx(5 / 6)
    assert expert_match(np.array([[1, 2]]), np.array([[3, 4]])) == 0


def test_prompts_are_cut_and_short_ones_left_out(tmp_path: Path) -> None:
    tokenizer = Path(__file__).parents[2] / "data" / "standins" / "tokenizer.json"
    texts = ["one two three four five six seven eight nine ten", "too short", "a b c d e f g h i j k l m n o p q r s t"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    prompts = load_prompts([path], tokenizer, num_prompts=2, num_tokens=8)
    assert [len(prompt) for prompt in prompts] == [8, 8]
    with pytest.raises(SpecterError, match="2 prompts of 8 tokens found, 3 wanted"):
        load_prompts([path], tokenizer, num_prompts=3, num_tokens=8)
    with pytest.raises(SpecterError, match="no prompts at .*none.jsonl"):
        load_prompts([tmp_path / "none.jsonl"], tokenizer, 1, 1)
