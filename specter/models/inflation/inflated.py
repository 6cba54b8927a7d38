"""A narrow checkpoint inflated to full size: the same function, with the bytes and flops of the wide model.

Has the interface of `Checkpoint`, tensor by tensor, so a loader streams it without a second copy in memory.
Construction: docs/decisions/0006 and `specter.models.inflation.isometry`. In the tiled layout, norm gains stay in the
norms and all factors on quantised matrices are powers of two; in the random layout, gains are folded into the next
matrix.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from specter.models.inflation.isometry import Isometry, Layout, NeuronCopies
from specter.models.inflation.plain_heads import PlainHeads
from specter.models.names import PARTS, expected_shapes
from specter.models.rope import softmax_scale
from specter.models.spec import ModelSpec

GROUP = 128  # input channels per INT4 group of a full-size model
_WHOLE = (
    "hidden", "dense_inter", "expert_inter", "shared_inter", "num_heads", "num_kv_heads", "nope_dim", "rope_dim",
    "v_dim", "kv_lora",
)  # fmt: skip
_FREE = (*_WHOLE, "name", "vocab", "max_positions", "rope")  # all other fields are the same


class InflatedCheckpoint:
    """The wide model `spec`, computed from `narrow` tensor by tensor on demand."""

    def __init__(
        self,
        narrow: Checkpoint,
        spec: ModelSpec,
        layout: Layout = "tiled",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """Raises SpecterError: `spec` is not `narrow` at whole multiples of its widths, or the layout is unknown."""
        check_inflatable(narrow.spec, spec)
        if layout not in get_args(Layout):
            raise SpecterError(f"layout={layout} is unknown", f"use layout={' or layout='.join(get_args(Layout))}")
        if layout == "random" and spec.layer_norm:
            raise SpecterError(f"a random isometry does not keep the LayerNorm of {spec.name}", "use layout=tiled")
        self.narrow, self.spec, self.layout, self.dtype = narrow, spec, layout, dtype
        self.device = torch.device(device)
        self._seed = seed
        generator = torch.Generator().manual_seed(seed) if layout == "random" else None

        def isometry(narrow: int, wide: int) -> Isometry:
            if generator is None or not narrow:
                return Isometry(narrow, wide)
            return Isometry.random(narrow, wide, generator, self.device)

        old = narrow.spec
        self._hidden = isometry(old.hidden, spec.hidden)
        self._latent = isometry(old.kv_lora, spec.kv_lora)
        self._nope = [isometry(old.nope_dim, spec.nope_dim) for _ in range(old.num_heads)]
        num_values = old.num_heads if old.is_latent else old.num_kv_heads
        self._value = [isometry(old.v_dim, spec.v_dim) for _ in range(num_values)]
        self._dense = NeuronCopies.build(old.dense_inter, spec.dense_inter, generator)
        self._shared = NeuronCopies.build(old.shared_inter, spec.shared_inter, generator)
        self._routed = NeuronCopies.build(old.expert_inter, spec.expert_inter, generator)
        self._heads = None if spec.is_latent else PlainHeads(old, spec, self._value)
        # Multiplies the matrices that read the MLP's norm and divides the norm's gain: a routed expert's `up` then
        # keeps its INT4 scales, which are near fp16's smallest values.
        self._boost = 1 / self._routed.up

    @property
    def num_tokens(self) -> int:
        """Rows of the vocabulary that are tokens; the others are zeros."""
        return self.narrow.spec.vocab

    def tensor(self, name: str) -> Tensor:
        """One tensor of the wide model by Specter's name, `dtype` on `device`; routed experts fused (see `experts`)."""
        head, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        if kind in ("gate_up_proj", "down_proj") and head.endswith(".experts"):
            layer = int(head.split(".")[2]) - self.spec.num_dense_layers
            return self.experts(layer)[kind == "down_proj"]
        return self._wide(name, head, kind).to(self.dtype)

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Routed experts of MoE layer `layer`: gate_up [E, 2F, D], down [E, D, F], `dtype` on `device`."""
        gate_up, down = (part.to(self.device) for part in self.narrow.experts(layer))
        gate, up = gate_up.chunk(2, dim=1)
        gain = self._read(f"model.layers.{layer + self.spec.num_dense_layers}.post_attention_layernorm.weight")
        wide = torch.cat((self._gate(gate, gain, self._routed), self._up(up, gain, self._routed)), dim=1)
        return wide.to(self.dtype), self._down(down, self._routed).to(self.dtype)

    def int4(self, experts: Int4Experts, layer: int) -> tuple[Int4Matrices, Int4Matrices, Int4Matrices]:
        """gate, up and down [E, out, in] of one MoE layer on `device`, tiled from the narrow model's `experts`.

        Dequantising and inflating commute exactly.

        Raises SpecterError: the random layout, groups that do not tile, or scales too small for fp16.
        """
        if self.layout != "tiled":
            raise SpecterError(
                "INT4 codes cannot be carried through a random isometry", "use layout=tiled, or quantise the wide model"
            )
        experts.check_plain()
        gate, up, down = (part.layer(layer).to(self.device) for part in (experts.gate, experts.up, experts.down))
        copies, hidden, inter = self._routed, self.spec.hidden, self.spec.expert_inter
        return (
            tile_int4(gate, inter, hidden, torch.full((hidden // gate.codes.shape[-1],), self._boost)),
            tile_int4(up, inter, hidden, torch.full((hidden // up.codes.shape[-1],), self._boost * copies.up)),
            tile_int4(down, hidden, inter, torch.tensor(copies.down)),
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under Specter's names, routed experts one by one."""
        for name in expected_shapes(self.spec, fused=True):
            stem, _, kind = name.rpartition(".")
            if kind == "gate_up_proj":
                gate_up, down = self.experts(int(name.split(".")[2]) - self.spec.num_dense_layers)
                for expert in range(self.spec.num_experts):
                    for part, weight in zip(PARTS, (*gate_up[expert].chunk(2), down[expert]), strict=True):
                        yield f"{stem}.{expert}.{part}.weight", weight
            elif kind != "down_proj":
                yield name, self.tensor(name)

    def digest(self) -> str:
        """SHA-256 of the narrow checkpoint's digest and of the parameters of the inflation."""
        parts = (self.narrow.digest(), self.spec.digest(), self.layout, str(self._seed), str(self.dtype))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    # -- inside: fp32, [out, in] as on the hub ----------------------------------------------------

    def _read(self, name: str) -> Tensor:
        return self.narrow.tensor(name).to(self.device)

    def _wide(self, name: str, head: str, kind: str) -> Tensor:
        value, is_bias = self._read(name), name.endswith(".bias")
        mlp_gain = f"{head.split('.mlp')[0]}.post_attention_layernorm.weight"
        copies = self._shared if head.endswith(".shared_experts") else self._dense
        match kind:
            case "embed_tokens":
                return self._pad_vocab(self._hidden.columns(value))
            case "lm_head" if is_bias:
                return F.pad(value, (0, self.spec.vocab - len(value)))
            case "lm_head":
                return self._pad_vocab(self._reader(value, self._read("model.norm.weight")))
            case "norm" | "input_layernorm":
                return self._gain(self._hidden, value)
            case "post_attention_layernorm":
                return self._gain(self._hidden, value) / self._boost
            case "kv_a_layernorm":
                return self._gain(self._latent, value)
            case "q_proj" | "k_proj" | "v_proj" if self._heads is not None and is_bias:
                return self._heads.rows(kind[0], value[:, None])[:, 0]
            case "o_proj" if is_bias:
                return self._hidden.rows(value[:, None])[:, 0]
            case "q_proj" | "k_proj" | "v_proj" if self._heads is not None:
                return self._reader(self._heads.rows(kind[0], value), self._attention_gain(head))
            case "o_proj" if self._heads is not None:
                return self._hidden.rows(self._heads.columns(value))
            case "q_proj":
                return self._q(value, self._attention_gain(head))
            case "kv_a_proj_with_mqa":
                latent, key = value.split((self.narrow.spec.kv_lora, self.spec.rope_dim))
                return self._reader(torch.cat((self._latent.rows(latent), key)), self._attention_gain(head))
            case "kv_b_proj":
                return self._kv_b(value, self._read(f"{head}.kv_a_layernorm.weight"))
            case "o_proj":
                return self._o(value)
            case "gate" | "shared_expert_gate":
                return self._reader(value * self._boost, self._read(mlp_gain))
            case "gate_proj":
                return self._gate(value, self._read(mlp_gain), copies)
            case "up_proj":
                return self._up(value, self._read(mlp_gain), copies)
            case "down_proj":
                return self._down(value, copies)
        raise SpecterError(f"{name} is not a tensor of {self.spec.name}", "use a hub name, routed experts fused")

    def _attention_gain(self, head: str) -> Tensor:
        return self._read(f"{head.removesuffix('.self_attn')}.input_layernorm.weight")

    def _gain(self, axis: Isometry, gain: Tensor) -> Tensor:
        """The wide norm's gain: undoes the change of length, and keeps the narrow gain in the tiled layout."""
        wide = axis.rows(gain[:, None])[:, 0] if self.layout == "tiled" else torch.ones(axis.wide, device=self.device)
        return wide * axis.shrink

    def _reader(self, weight: Tensor, gain: Tensor) -> Tensor:
        """A matrix [..., out, d] that reads the normalised hidden state, as [..., out, D]."""
        return self._hidden.columns(weight if self.layout == "tiled" else weight * gain)

    def _pad_vocab(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0, 0, self.spec.vocab - rows.shape[0]))

    def _repeat_heads(self, heads: Tensor) -> Tensor:
        """[h, rows, columns] -> [H * rows, columns]; wide head i is narrow head i % h."""
        return heads.repeat(self.spec.num_heads // heads.shape[0], 1, 1).flatten(0, 1)

    def _q(self, weight: Tensor, gain: Tensor) -> Tensor:
        old = self.narrow.spec
        heads = weight.view(old.num_heads, old.qk_dim, -1) * (softmax_scale(old) / softmax_scale(self.spec))
        wide = [
            torch.cat((axis.rows(head[: old.nope_dim]) * axis.shrink, head[old.nope_dim :]))
            for axis, head in zip(self._nope, heads, strict=True)
        ]
        return self._reader(self._repeat_heads(torch.stack(wide)), gain)

    def _kv_b(self, weight: Tensor, gain: Tensor) -> Tensor:
        old = self.narrow.spec
        heads = (weight if self.layout == "tiled" else weight * gain).view(old.num_heads, -1, old.kv_lora)
        wide = [
            torch.cat((nope.rows(head[: old.nope_dim]), value.rows(head[old.nope_dim :])))
            for nope, value, head in zip(self._nope, self._value, heads, strict=True)
        ]
        return self._latent.columns(self._repeat_heads(torch.stack(wide)))

    def _o(self, weight: Tensor) -> Tensor:
        old, num_copies = self.narrow.spec, self.spec.num_heads // self.narrow.spec.num_heads
        heads = weight.unflatten(1, (old.num_heads, old.v_dim)).unbind(1)
        wide = [axis.columns(head) * (axis.shrink / num_copies) for axis, head in zip(self._value, heads, strict=True)]
        return self._hidden.rows(torch.cat(wide * num_copies, dim=1))

    def _gate(self, weight: Tensor, gain: Tensor, copies: NeuronCopies) -> Tensor:
        return self._reader(weight * self._boost, gain).repeat(*[1] * (weight.dim() - 2), len(copies.down), 1)

    def _up(self, weight: Tensor, gain: Tensor, copies: NeuronCopies) -> Tensor:
        return self._gate(weight * copies.up, gain, copies)

    def _down(self, weight: Tensor, copies: NeuronCopies) -> Tensor:
        repeated = weight.repeat(*[1] * (weight.dim() - 1), len(copies.down))
        return self._hidden.rows(repeated * copies.column_factors(weight.shape[-1]).to(self.device))


def check_inflatable(narrow: ModelSpec, wide: ModelSpec) -> None:
    """Raises SpecterError unless `wide` is `narrow` at whole multiples of its widths."""
    remedy = f"inflate a stand-in trained for {wide.name}"
    same = [field.name for field in dataclasses.fields(ModelSpec) if field.name not in _FREE]
    for field in same if not wide.is_latent else [*same, "rope_dim"]:
        if getattr(narrow, field) != getattr(wide, field):
            raise SpecterError(
                f"{narrow.name} has {field}={getattr(narrow, field)}, {wide.name} {getattr(wide, field)}", remedy
            )
    for field in _WHOLE:
        old, new = getattr(narrow, field), getattr(wide, field)
        if new % old if old else new:
            raise SpecterError(f"{field}={new} of {wide.name} is no multiple of {old}", remedy)
    if not wide.is_latent and (wide.num_heads // wide.num_kv_heads) % (narrow.num_heads // narrow.num_kv_heads):
        raise SpecterError(f"{narrow.name} has more queries per key than {wide.name}", remedy)
    stride = wide.rope_dim // narrow.rope_dim
    rope = dataclasses.replace(
        wide.rope, short_factors=wide.rope.short_factors[::stride], long_factors=wide.rope.long_factors[::stride]
    )
    if narrow.rope != rope:
        raise SpecterError(f"{narrow.name} has rope={narrow.rope}, {wide.name} {rope} in the pairs they share", remedy)
    if wide.vocab < narrow.vocab:
        raise SpecterError(f"{narrow.name} has {narrow.vocab} tokens, {wide.name} only {wide.vocab}", remedy)


def tile_int4(narrow: Int4Matrices, num_rows: int, num_columns: int, factors: Tensor) -> Int4Matrices:
    """Codes of a matrix tiled to [..., num_rows, num_columns], copy c of the columns scaled by `factors[c]`.

    A narrow row of at most `GROUP` columns must be one group; groups then are `GROUP` wide and hold whole copies.

    Raises SpecterError: groups that do not tile, or a scale that fp16 cannot hold after its factor.
    """
    *batch, rows, columns = narrow.codes.shape
    num_copies = num_columns // columns
    group = narrow.group if columns > GROUP else min(GROUP, num_columns)
    copies_per_group = max(1, group // columns)
    alike = factors.view(-1, copies_per_group) if num_copies % copies_per_group == 0 else None
    if group % narrow.group or (columns <= GROUP and narrow.group != columns) or alike is None:
        raise SpecterError(
            f"groups of {narrow.group} in rows of {columns} do not tile groups of {group}",
            "quantise the stand-in with group=128",
        )
    if bool((alike != alike[:, :1]).any()):
        raise SpecterError("copies within one INT4 group have unequal weights", "use other widths for the stand-in")
    leading = [1] * len(batch)
    down = num_rows // rows
    per_group = alike[:, 0].to(narrow.scales.device).repeat_interleave(narrow.scales.shape[-1])
    exact = narrow.scales.float().repeat(*leading, 1, alike.shape[0]) * per_group
    scales = exact.half()
    if not bool((scales.float() == exact).all()):
        raise SpecterError(
            f"{int((scales.float() != exact).sum())} INT4 scales are too small for fp16 once inflated",
            "train the stand-in longer, or quantise its experts by round-to-nearest",
        )
    return Int4Matrices(
        codes=narrow.codes.repeat(*leading, down, num_copies),
        scales=scales.repeat(*leading, down, 1),
        zeros=narrow.zeros.repeat(*leading, down, alike.shape[0]),
        group=group,
    )
