"""Inflation keeps the function, and the INT4 codes keep the draft."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.full_size import FULL_SIZE
from specter.models.inflation.inflated import InflatedCheckpoint, check_inflatable, tile_int4
from specter.models.inflation.isometry import NeuronCopies
from specter.models.spec import ModelSpec, RopeSpec
from specter.models.weights import DecoderWeights
from specter.quantize.rtn import quantize_rtn
from tests.helpers import TINY_PHI, TINY_QWEN, exit_status, random_tensors, run_pass
from tools.standin import inflate
from tools.standin.specs import NARROW as SMALL_SIZE

NARROW = ModelSpec(
    name="narrow",
    vocab=50,
    hidden=32,
    num_layers=3,
    num_dense_layers=1,
    dense_inter=10,
    expert_inter=32,
    num_experts=6,
    top_k=2,
    shared_inter=64,
    num_heads=2,
    nope_dim=8,
    rope_dim=8,
    v_dim=8,
    kv_lora=16,
    routed_scaling=1.5,
    max_positions=128,
    rope=RopeSpec(factor=4.0, mscale=0.707, mscale_all_dim=0.707, original_max_positions=64),
)
# 12 copies of an expert's neurons: like the real 44, no power of two.
WIDE = dataclasses.replace(
    NARROW,
    name="wide",
    vocab=64,
    hidden=128,
    dense_inter=30,
    expert_inter=384,
    shared_inter=768,
    num_heads=4,
    nope_dim=16,
    v_dim=32,
    kv_lora=64,
    max_positions=256,
)
TOKENS = list(range(3, 33))


@pytest.fixture
def narrow(tmp_path: Path) -> Checkpoint:
    write_checkpoint(tmp_path, NARROW, random_tensors(NARROW, seed=1))
    return Checkpoint.open(tmp_path)


def decoder_of(source: Checkpoint | InflatedCheckpoint) -> tuple[Decoder, ExpertStore]:
    spec = source.spec
    codec = RawCodec(torch.float32, spec.expert_inter, spec.hidden)
    store = ExpertStore(codec, (source.experts(layer) for layer in range(spec.num_moe_layers)))
    weights = DecoderWeights.load(source)  # type: ignore[arg-type]
    return Decoder(spec, weights, SlotArena(spec.num_experts, codec), None, tile=16, capacity=64), store


@pytest.mark.parametrize("layout", ["tiled", "random"])
def test_the_function_is_preserved(narrow: Checkpoint, layout: str) -> None:
    before = run_pass(*decoder_of(narrow), TOKENS, 0)
    wide = InflatedCheckpoint(narrow, WIDE, layout, dtype=torch.float32)  # type: ignore[arg-type]
    after = run_pass(*decoder_of(wide), TOKENS, 0)
    for old, new in zip(before.outputs, after.outputs, strict=True):
        assert old.abs().max() > 0.5
        torch.testing.assert_close(new[: NARROW.vocab], old, atol=1e-4, rtol=1e-4)
        assert not new[NARROW.vocab :].any()
    for a, b in zip(before.routing, after.routing, strict=True):
        assert (a == b).all()


QWEN = dataclasses.replace(TINY_QWEN, hidden=32, num_heads=2, num_kv_heads=2, rope_dim=8, v_dim=8)
WIDE_QWEN = dataclasses.replace(
    QWEN, name="wide", vocab=128, hidden=64, num_heads=6, num_kv_heads=6, rope_dim=24, v_dim=24, expert_inter=48,
    shared_inter=120,
)  # fmt: skip
ROPE = dataclasses.replace(TINY_PHI.rope, short_factors=(1.0, 1.3), long_factors=(2.0, 3.0))
PHI = dataclasses.replace(TINY_PHI, hidden=32, num_heads=4, num_kv_heads=2, rope_dim=4, v_dim=4, rope=ROPE)
WIDE_ROPE = dataclasses.replace(ROPE, short_factors=(1.0, 1.2, 1.3, 1.4), long_factors=(2.0, 2.5, 3.0, 3.5))
WIDE_PHI = dataclasses.replace(
    PHI, name="wide", vocab=128, hidden=96, num_heads=24, num_kv_heads=6, rope_dim=8, v_dim=8, expert_inter=72,
    rope=WIDE_ROPE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("small", "large", "layout"),
    [(QWEN, WIDE_QWEN, "tiled"), (QWEN, WIDE_QWEN, "random"), (PHI, WIDE_PHI, "tiled")],
    ids=["qwen", "qwen, random", "phi"],
)
def test_the_function_of_other_families_is_preserved(
    small: ModelSpec, large: ModelSpec, layout: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "narrow", small, random_tensors(small, seed=1))
    narrow = Checkpoint.open(tmp_path / "narrow")
    wide = InflatedCheckpoint(narrow, large, layout, dtype=torch.float32)  # type: ignore[arg-type]
    before, after = run_pass(*decoder_of(narrow), TOKENS, 0), run_pass(*decoder_of(wide), TOKENS, 0)
    for old, new in zip(before.outputs, after.outputs, strict=True):
        torch.testing.assert_close(new[: small.vocab], old, atol=1e-4, rtol=1e-4)
        assert not new[small.vocab :].any()
    for a, b in zip(before.routing, after.routing, strict=True):
        assert (a == b).all()
    write_checkpoint(tmp_path / "wide", large, {name: tensor.clone() for name, tensor in wide.tensors()})
    assert dataclasses.replace(Checkpoint.open(tmp_path / "wide").spec, name="wide") == large


@pytest.mark.parametrize("name", FULL_SIZE)
def test_stand_ins_inflate_to_the_published_sizes(name: str) -> None:
    old, new = SMALL_SIZE[name], FULL_SIZE[name]
    check_inflatable(old, new)
    columns = torch.arange(new.expert_inter) % old.expert_inter
    for group in columns.view(-1, 128):
        assert group.bincount(minlength=old.expert_inter).unique().tolist() == [128 // old.expert_inter]
    codes = torch.zeros(4, old.expert_inter, dtype=torch.uint8)
    scales = torch.ones(4, 1).half()
    matrix = Int4Matrices(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), old.expert_inter)
    factors = torch.tensor(NeuronCopies.build(old.expert_inter, new.expert_inter, None).down)
    assert tile_int4(matrix, 4, new.expert_inter, factors).group == 128


def test_a_random_isometry_of_a_layer_norm_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, PHI, random_tensors(PHI, seed=1))
    with pytest.raises(SpecterError, match="LayerNorm"):
        InflatedCheckpoint(Checkpoint.open(tmp_path), WIDE_PHI, "random")
    with pytest.raises(SpecterError, match="in the pairs they share"):
        check_inflatable(PHI, dataclasses.replace(WIDE_PHI, rope=dataclasses.replace(WIDE_ROPE, theta=5.0)))


def narrow_int4(checkpoint: Checkpoint) -> Int4Experts:
    gate_up, down = zip(*(checkpoint.experts(layer) for layer in range(checkpoint.spec.num_moe_layers)), strict=True)
    gate, up = torch.stack(gate_up).chunk(2, dim=2)
    gates, ups, downs = (quantize_rtn(part, 128) for part in (gate, up, torch.stack(down)))
    return Int4Experts(gates, ups, downs, method="rtn", num_fallback=0)


def test_dequantised_inflated_is_inflated_dequantised(narrow: Checkpoint, tmp_path: Path) -> None:
    codes = narrow_int4(narrow)
    tensors = {name: narrow.tensor(name) for name in random_tensors(NARROW, 0) if ".mlp.experts." not in name}
    for layer in range(NARROW.num_moe_layers):
        stem = f"model.layers.{layer + 1}.mlp.experts"
        gate, up, down = (getattr(codes, name).dequantize()[layer] for name in ("gate", "up", "down"))
        tensors |= {f"{stem}.gate_up_proj": torch.cat((gate, up), 1), f"{stem}.down_proj": down}
    write_checkpoint(tmp_path / "rounded", NARROW, tensors)
    rounded = InflatedCheckpoint(Checkpoint.open(tmp_path / "rounded"), WIDE, dtype=torch.float32)
    wide = InflatedCheckpoint(narrow, WIDE)
    for layer in range(NARROW.num_moe_layers):
        gate, up, down = wide.int4(codes, layer)
        expected_gate_up, expected_down = rounded.experts(layer)
        assert torch.equal(torch.cat((gate.dequantize(), up.dequantize()), 1), expected_gate_up)
        assert torch.equal(down.dequantize(), expected_down)
        assert (gate.group, down.group) == (128, 128)


def test_every_group_holds_every_narrow_dimension_equally_often() -> None:
    old, new = SMALL_SIZE["deepseek_v2_lite"], FULL_SIZE["deepseek_v2_lite"]
    check_inflatable(old, new)
    for narrow, wide in ((old.hidden, new.hidden), (old.expert_inter, new.expert_inter)):
        columns = torch.arange(wide) % narrow
        for group in columns.view(-1, 128):
            assert group.bincount(minlength=narrow).unique().tolist() == [128 // narrow]


def test_bf16_of_the_inflated_is_the_inflated_bf16(narrow: Checkpoint) -> None:
    """Powers of two commute with rounding: the wide target is the narrow BF16 target."""
    exact = InflatedCheckpoint(narrow, WIDE, dtype=torch.float32)
    for wide, rounded in zip(exact.experts(0), InflatedCheckpoint(narrow, WIDE).experts(0), strict=True):
        assert torch.equal(wide.bfloat16(), rounded)
    for wide, old in zip(exact.experts(0), narrow.experts(0), strict=True):
        mantissas, tiled = wide.frexp().mantissa, old.frexp().mantissa
        for rows in range(0, wide.shape[1] // 2, old.shape[1]):  # down's rows, or the gate's
            part = mantissas[:, rows : rows + old.shape[1] // 2].unflatten(-1, (-1, old.shape[-1]))
            assert (part == tiled[:, None, : old.shape[1] // 2].transpose(1, 2)).all()


def test_copies_of_neurons_add_up_to_the_neuron() -> None:
    for num_copies in (1, 2, 3, 11, 32, 44):
        for generator in (None, torch.Generator().manual_seed(0)):
            copies = NeuronCopies.build(4, 4 * num_copies, generator)
            assert len(copies.down) == num_copies
            assert copies.up * sum(copies.down) == pytest.approx(1.0, abs=1e-12)
    tiled = NeuronCopies.build(32, 1408, None)
    assert sorted({copy * tiled.up for copy in tiled.down}) == [1 / 64, 1 / 32]


def test_tensors_are_the_hub_checkpoint(narrow: Checkpoint, tmp_path: Path) -> None:
    wide = InflatedCheckpoint(narrow, WIDE, dtype=torch.float32)
    write_checkpoint(tmp_path / "wide", WIDE, {name: tensor.clone() for name, tensor in wide.tensors()})
    read = Checkpoint.open(tmp_path / "wide")
    for ours, theirs in zip(wide.experts(1), read.experts(1), strict=True):
        assert torch.equal(ours, theirs)


def test_what_does_not_tile_is_refused(narrow: Checkpoint) -> None:
    with pytest.raises(SpecterError, match="kv_lora"):
        check_inflatable(NARROW, dataclasses.replace(WIDE, kv_lora=40))
    with pytest.raises(SpecterError, match="top_k"):
        check_inflatable(NARROW, dataclasses.replace(WIDE, top_k=3))
    with pytest.raises(SpecterError, match="layout=rotten"):
        InflatedCheckpoint(narrow, WIDE, "rotten")  # type: ignore[arg-type]
    with pytest.raises(SpecterError, match="random isometry"):
        InflatedCheckpoint(narrow, WIDE, "random").int4(narrow_int4(narrow), 0)


def test_scales_of_the_input_are_refused(narrow: Checkpoint) -> None:
    wide = InflatedCheckpoint(narrow, WIDE)
    scaled = dataclasses.replace(narrow_int4(narrow), input_scales=torch.ones(2, NARROW.hidden))
    with pytest.raises(SpecterError, match="AWQ"):
        wide.int4(scaled, 0)


def test_int4_that_does_not_tile_is_refused() -> None:
    def matrix(group: int, scale: float) -> Int4Matrices:
        codes = torch.zeros(4, 32, dtype=torch.uint8)
        scales = torch.full((4, 32 // group), scale).half()
        return Int4Matrices(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), group)

    ones: Tensor = torch.ones(8)
    with pytest.raises(SpecterError, match="groups of 16"):
        tile_int4(matrix(16, 1.0), 8, 256, ones)
    with pytest.raises(SpecterError, match="too small for fp16"):
        tile_int4(matrix(32, 2.0**-24), 8, 256, ones / 2)
    with pytest.raises(SpecterError, match="unequal"):
        tile_int4(matrix(32, 1.0), 8, 256, torch.tensor([1.0, 0.5] * 4))


def test_the_command_writes_a_readable_directory(
    narrow: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inflate.FULL_SIZE, "wide", WIDE)
    monkeypatch.setattr(inflate, "MAX_SHARD_BYTES", 2**20)
    out = tmp_path / "out"
    arguments = [f"checkpoint={narrow.directory}", f"out={out}", "model=wide", "dtype=float32"]
    assert exit_status(inflate.main, arguments) == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    read, wide = Checkpoint.open(out), InflatedCheckpoint(narrow, WIDE, dtype=torch.float32)
    assert torch.equal(read.tensor("lm_head.weight"), wide.tensor("lm_head.weight"))
    assert torch.equal(read.experts(1)[1], wide.experts(1)[1])
    assert exit_status(inflate.main, arguments) == 2  # nothing is overwritten
    odd = [f"checkpoint={narrow.directory}", f"out={tmp_path / 'o'}", "layout=odd", "model=wide"]
    assert exit_status(inflate.main, odd) == 2
    assert exit_status(inflate.main, ["checkpoint=nowhere", "out=x"]) == 2
