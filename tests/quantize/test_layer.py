"""Calibration: the inputs of the target's experts, and a layer quantized from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from specter.errors import SpecterError
from specter.models import layerwise
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.spec import ModelSpec
from specter.quantize.activations import walk_moe_layers
from specter.quantize.calibration import CALIBRATION, TOKENIZER, load_calibration
from specter.quantize.gptq import gptq_layer, quantize_gptq
from specter.quantize.layer import LayerExperts, LayerInputs, collect_hessians, output_error
from specter.quantize.quantizers import build_int4
from specter.quantize.rtn import quantize_rtn, rtn_layer
from tests.helpers import FAMILIES
from tools.standin.calibration import cut_windows
from tools.standin.checkpoint import to_hub
from tools.standin.network import Network, experts_dense, init_weights

E, D, F = 4, 32, 16


def layer_experts(seed: int = 0) -> LayerExperts:
    generator = torch.Generator().manual_seed(seed)
    gate, up, down = (torch.randn(E, *shape, generator=generator) * 0.1 for shape in ((F, D), (F, D), (D, F)))
    return LayerExperts(gate, up, down)


def layer_inputs(num_tokens: int, seed: int = 0, experts: int = E) -> LayerInputs:
    """Correlated inputs, each for two different ones of the first `experts`."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(D, D, generator=torch.Generator().manual_seed(99)) / torch.arange(1, D + 1)[:, None]
    hidden = torch.randn(num_tokens, D, generator=generator) @ basis
    scores = torch.rand(num_tokens, experts, generator=generator)
    return LayerInputs(hidden, scores.topk(2).indices)


def test_visits_are_the_rows_of_each_expert() -> None:
    inputs = layer_inputs(50, experts=3)
    visits = inputs.visits(E)
    for expert in range(E):
        assert visits[expert].tolist() == [i for i in range(50) if expert in inputs.routing[i].tolist()]
    assert len(visits[3]) == 0


def test_hessians_belong_to_their_expert() -> None:
    experts, inputs = layer_experts(), layer_inputs(60)
    hessians = collect_hessians(experts, inputs)
    for expert in range(E):
        rows = torch.stack([x for x, ids in zip(inputs.hidden, inputs.routing, strict=True) if expert in ids])
        inner = torch.nn.functional.silu(rows @ experts.gate[expert].T) * (rows @ experts.up[expert].T)
        assert inputs.counts(E)[expert] == len(rows)
        torch.testing.assert_close(hessians.hidden[expert], rows.T @ rows)
        torch.testing.assert_close(hessians.inner[expert], inner.T @ inner)


def test_a_layer_is_its_matrices_quantised_one_by_one() -> None:
    experts, inputs = layer_experts(), layer_inputs(400)
    layer = gptq_layer(experts, inputs, 16, D)
    hessians = collect_hessians(experts, inputs)
    for matrices, weights, sums in (
        (layer.gate, experts.gate, hessians.hidden),
        (layer.up, experts.up, hessians.hidden),
        (layer.down, experts.down, hessians.inner),
    ):
        for expert in range(E):
            single = quantize_gptq(weights[expert], sums[expert], 16)
            assert (matrices.codes[expert] != single.codes).float().mean() < 0.005
            assert torch.equal(matrices.scales[expert], single.scales)


def test_gptq_experts_are_closer_than_rounded_ones() -> None:
    experts, seen, held_out = layer_experts(), layer_inputs(800, seed=1), layer_inputs(400, seed=2)
    errors = {
        method: output_error(experts, build_int4(method, 128, D)(experts, seen).dequantize(), held_out)
        for method in ("gptq", "rtn")
    }
    assert 0 < errors["gptq"] < 0.8 * errors["rtn"]
    assert output_error(experts, experts, held_out) == 0


def test_uncovered_experts_fall_back_and_are_counted() -> None:
    experts, inputs = layer_experts(), layer_inputs(300, experts=3)
    layer = gptq_layer(experts, inputs, 128, D)
    assert layer.tokens[3] == 0 and int(layer.tokens.sum()) == 600
    assert layer.fallback.tolist() == [False, False, False, True]
    for matrices, weights in ((layer.gate, experts.gate), (layer.up, experts.up), (layer.down, experts.down)):
        rtn = quantize_rtn(weights, 128)
        assert torch.equal(matrices.codes[3], rtn.codes[3])
        assert not torch.equal(matrices.codes[0], rtn.codes[0])
    all_rounded = gptq_layer(experts, inputs, 128, 301)
    assert all_rounded.fallback.all() and torch.equal(all_rounded.down.codes, quantize_rtn(experts.down, 128).codes)


def test_rtn_counts_tokens_but_no_fallbacks() -> None:
    layer = rtn_layer(layer_experts(), layer_inputs(30, experts=3), 128)
    assert layer.tokens[3] == 0 and int(layer.tokens.sum()) == 60
    assert not layer.fallback.any()


def test_activations_that_are_not_numbers_are_refused() -> None:
    inputs = layer_inputs(30)
    inputs.hidden[3, 4] = float("nan")
    with pytest.raises(SpecterError, match="activations"):
        gptq_layer(layer_experts(), inputs, 128, D)


# -- the pass over the model ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_walk_sees_what_the_network_feeds_its_experts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = FAMILIES[family]
    weights = init_weights(spec, seed=0)
    for name in [name for name in weights if "norm" in name or name.endswith("bias")]:
        weights[name] = torch.rand_like(weights[name]) + 0.5
    write_checkpoint(tmp_path, spec, to_hub(weights, spec))
    tokens = torch.randint(0, spec.vocab, (3, 20), generator=torch.Generator().manual_seed(1))
    fed: list[tuple[Tensor, Tensor]] = []

    def spy(h: Tensor, gains: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        fed.append((h, ids))
        return experts_dense(h, gains, ids, gate_up, down)

    Network(spec, 20, "cpu", experts=spy)(weights, tokens)
    monkeypatch.setattr(layerwise, "SEQUENCES_AT_ONCE", 2)  # an uneven split
    walked = list(walk_moe_layers(Checkpoint.open(tmp_path), tokens))
    assert len(walked) == len(fed) == spec.num_moe_layers
    for layer, (step, (hidden, ids)) in enumerate(zip(walked, fed, strict=True)):
        experts, inputs = step.experts, step.inputs
        torch.testing.assert_close(inputs.hidden, hidden, rtol=1e-4, atol=1e-5)
        assert torch.equal(inputs.routing.sort().values, ids.sort().values)
        assert torch.equal(torch.cat((experts.gate, experts.up), 1), weights["gate_up"][layer])
        assert torch.equal(experts.down, weights["down"][layer])


# -- calibration text -----------------------------------------------------------------------------------


def test_windows_are_spread_over_the_whole_text() -> None:
    windows = cut_windows(np.arange(1000, dtype=np.uint16), 5, 20)
    assert windows.shape == (5, 20) and windows.dtype == np.uint16
    assert windows[0, 0] == 0 and windows[-1, -1] == 999
    assert (np.diff(windows, axis=1) == 1).all()
    assert len(np.unique(windows)) == 100
    with pytest.raises(SpecterError, match="99 training tokens"):
        cut_windows(np.arange(99, dtype=np.uint16), 5, 20)


def test_the_shipped_text_is_coded_anew_for_another_tokenizer(spec: ModelSpec, tmp_path: Path) -> None:
    shipped = Tokenizer.from_file(str(TOKENIZER))
    standin = dataclasses.replace(spec, vocab=shipped.get_vocab_size())
    own = load_calibration(CALIBRATION, standin)
    assert torch.equal(own.tokens, load_calibration(CALIBRATION, standin, tokenizer=TOKENIZER).tokens)
    assert torch.equal(load_calibration(CALIBRATION, standin, 2).tokens, own.tokens[[0, -1]])

    whole_words = Tokenizer(models.WordLevel({"the": 0, "of": 1, "?": 2}, unk_token="?"))
    whole_words.pre_tokenizer = pre_tokenizers.Whitespace()
    whole_words.save(str(tmp_path / "words.json"))
    other = load_calibration(CALIBRATION, dataclasses.replace(spec, vocab=102400), tokenizer=tmp_path / "words.json")
    assert set(other.tokens.unique().tolist()) == {0, 1, 2} and other.tokens.shape[1] == own.tokens.shape[1]
    words = [word for row in own.tokens.tolist() for word in shipped.decode(row).split()]
    assert 0.9 * words.count("the") < (other.tokens == 0).sum() < 1.2 * words.count("the")


def test_a_text_is_coded_by_the_models_tokenizer(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("A ferry left the harbour.\n" * 200)
    standin = dataclasses.replace(spec, vocab=8192)
    given = load_calibration(tmp_path / "mine.txt", standin, tokenizer=TOKENIZER)
    assert given.tokens.shape[1] == 256 and given.num_held_out == 1
    text = Tokenizer.from_file(str(TOKENIZER)).decode(given.tokens[0].tolist())
    assert text.startswith("A ferry left the harbour.\nA ferry")
    with pytest.raises(SpecterError, match="no tokenizer"):
        load_calibration(tmp_path / "mine.txt", standin)
    (tmp_path / "mine.txt").write_text("short")
    with pytest.raises(SpecterError, match="0 sequences"):
        load_calibration(tmp_path / "mine.txt", standin, tokenizer=TOKENIZER)


def test_tokens_of_an_unknown_vocabulary_are_refused(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="102400 tokens") as error:
        load_calibration(CALIBRATION, dataclasses.replace(spec, vocab=102400))
    assert "tokenizer=FILE" in error.value.remedy
    with pytest.raises(SpecterError, match="not a tokenizer"):
        load_calibration(CALIBRATION, dataclasses.replace(spec, vocab=102400), tokenizer=tmp_path / "none.json")


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        (None, "no calibration tokens"),
        (np.zeros((4, 8), np.int32), "int32"),
        (np.zeros(8, np.uint16), r"\[8\]"),
        (np.zeros((1, 8), np.uint16), r"\[1, 8\]"),
        (np.zeros((2, 5000), np.uint16), "positions"),
        (np.full((4, 8), 64, np.uint16), "token 64 is beyond the vocabulary of 64"),
    ],
)
def test_bad_calibration_text_is_refused(
    spec: ModelSpec, tmp_path: Path, tokens: np.ndarray | None, fault: str
) -> None:
    if tokens is not None:
        save_file({"tokens": tokens}, tmp_path / "calibration.safetensors")
    with pytest.raises(SpecterError, match=fault):
        load_calibration(tmp_path / "calibration.safetensors", spec)
