"""Small random models, and a simple driver of a target pass. For tests only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.config import SystemConfig
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.kernels.reference import Product, product
from specter.models.base import Model, Output, Routing
from specter.models.checkpoint import SINGLE_FILE, Checkpoint, write_checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.names import expected_shapes
from specter.models.spec import ExpertId, ModelSpec, RopeSpec
from specter.models.weights import DecoderWeights
from specter.quantize.gptq_writer import layer_tensors, shard_name, write_config, write_index
from specter.quantize.layer import Int4Layer
from specter.registry import import_modules

CONF = Path(__file__).parents[1] / "conf"
import_modules("baselines")


def load_system(name: str) -> SystemConfig:
    """A system of conf/system."""
    return SystemConfig(**yaml.safe_load((CONF / "system" / f"{name}.yaml").read_text()))


BASELINES = [
    load_system(name)
    for name in (
        "lru",
        "lru_next_gate",
        "mixtral_offloading",
        "mixtral_speculative_loading",
        "on_demand",
        "resident",
        "specmoeoff",
        "specmoeoff_tuned",
    )
]

TINY = ModelSpec(
    name="tiny",
    vocab=97,
    hidden=48,
    num_layers=4,
    num_dense_layers=1,
    dense_inter=48,
    expert_inter=16,
    num_experts=8,
    top_k=3,
    shared_inter=32,
    num_heads=3,
    nope_dim=8,
    rope_dim=8,
    v_dim=8,
    kv_lora=16,
    routed_scaling=1.5,
    max_positions=512,
    rope=RopeSpec(factor=4.0, mscale=0.707, mscale_all_dim=0.707, original_max_positions=128),
)
TINY_QWEN = ModelSpec(
    name="tiny-qwen",
    family="qwen2_moe",
    vocab=97,
    hidden=48,
    num_layers=3,
    num_dense_layers=0,
    dense_inter=0,
    expert_inter=16,
    num_experts=8,
    top_k=3,
    shared_inter=40,
    shared_gate=True,
    num_heads=3,
    num_kv_heads=3,
    nope_dim=0,
    rope_dim=16,
    v_dim=16,
    kv_lora=0,
    qkv_bias=True,
    max_positions=512,
    rope=RopeSpec(theta=1000.0),
)
TINY_PHI = ModelSpec(
    name="tiny-phi",
    family="phimoe",
    vocab=97,
    hidden=48,
    num_layers=3,
    num_dense_layers=0,
    dense_inter=0,
    expert_inter=24,
    num_experts=8,
    top_k=2,
    shared_inter=0,
    num_heads=6,
    num_kv_heads=2,
    nope_dim=0,
    rope_dim=8,
    v_dim=8,
    kv_lora=0,
    qkv_bias=True,
    o_bias=True,
    head_bias=True,
    layer_norm=True,
    norm_eps=1e-5,
    router="sparsemixer",
    router_jitter=0.01,
    max_positions=1024,
    rope=RopeSpec(
        theta=1000.0,
        short_factors=(1.0, 1.05, 1.2, 1.5),
        long_factors=(1.1, 1.5, 3.0, 8.0),
        short_mscale=1.1,
        long_mscale=1.25,
        original_max_positions=256,
    ),
)
FAMILIES = {"deepseek": TINY, "qwen": TINY_QWEN, "phi": TINY_PHI}


def random_tensors(spec: ModelSpec, seed: int, fused: bool = False) -> dict[str, Tensor]:
    """A random checkpoint with lively activations: matrices ~ N(0, 1 / fan_in), gains around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(spec, fused).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.3 * noise if name.endswith("bias") else 1 + 0.1 * noise
        else:
            tensors[name] = noise * (1.0 if "embed" in name else shape[-1] ** -0.5)
    return tensors


def write_random(directory: Path, spec: ModelSpec = TINY, seed: int = 0) -> None:
    write_checkpoint(directory, spec, random_tensors(spec, seed))


def round_to_nearest(weights: Tensor) -> Int4Matrices:
    """Symmetric INT4, one group per row; weights [..., out, in]."""
    scales = (weights.abs().amax(-1, keepdim=True) / 7).half()
    codes = (weights / scales.float()).round().clamp(-8, 7) + 8
    return Int4Matrices(codes.to(torch.uint8), scales, torch.full_like(scales, 8, dtype=torch.uint8), weights.shape[-1])


def write_directory(
    directory: Path, experts: Int4Experts, spec: ModelSpec, group_size: int, has_index: bool = False
) -> None:
    """An AutoGPTQ directory as the quantizer makes it: one file, or one per layer and an index."""
    sym = all(bool((matrices.zeros == 8).all()) for matrices in (experts.gate, experts.up, experts.down))
    none, scales = torch.zeros(0), experts.input_scales
    layers = [
        layer_tensors(
            spec,
            index,
            Int4Layer(
                experts.gate.layer(index), experts.up.layer(index), experts.down.layer(index), none, none,
                None if scales is None else scales[index],
            ),
        )
        for index in range(spec.num_moe_layers)
    ]  # fmt: skip
    write_config(directory, spec, group_size, sym=sym, method=experts.method, num_fallback=experts.num_fallback)
    if not has_index:
        save_file({name: tensor for layer in layers for name, tensor in layer.items()}, directory / SINGLE_FILE)
        return
    for number, layer in enumerate(layers):
        save_file(layer, directory / shard_name(number, len(layers)))
    weight_map = {name: shard_name(number, len(layers)) for number, layer in enumerate(layers) for name in layer}
    write_index(directory, weight_map, sum(tensor.nbytes for layer in layers for tensor in layer.values()))


def exit_status(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """The exit status of a command."""
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def quantize(spec: ModelSpec, store: ExpertStore) -> Int4Experts:
    layers = [store.layer(layer) for layer in range(spec.num_moe_layers)]
    gate, up = torch.stack([gate_up for gate_up, _ in layers]).float().chunk(2, dim=2)
    down = torch.stack([down for _, down in layers]).float()
    return Int4Experts(round_to_nearest(gate), round_to_nearest(up), round_to_nearest(down), "rtn", 0)


@dataclass(frozen=True, slots=True)
class Live:
    """A decoder with its store, and a slot for every expert or fewer."""

    decoder: Decoder
    store: ExpertStore


def open_live(
    directory: Path, num_slots: int | None = None, tile: int = 16, capacity: int = 256, mm: Product = product
) -> Live:
    """Builds decoder and draft from a checkpoint directory; by default every expert has a slot."""
    checkpoint = Checkpoint.open(directory)
    spec = checkpoint.spec
    codec = RawCodec(torch.float32, spec.expert_inter, spec.hidden)
    store = ExpertStore.read(codec, checkpoint, range(spec.num_moe_layers))
    num_all = spec.num_moe_layers * spec.num_experts
    arena = SlotArena(num_all if num_slots is None else num_slots, codec)
    weights = DecoderWeights.load(checkpoint)
    return Live(Decoder(spec, weights, arena, quantize(spec, store), tile=tile, capacity=capacity, mm=mm), store)


def random_live(
    directory: Path,
    spec: ModelSpec = TINY,
    seed: int = 0,
    num_slots: int | None = None,
    tile: int = 16,
    capacity: int = 256,
) -> Live:
    """A random model, written to and read back from `directory`."""
    write_random(directory, spec, seed)
    return open_live(directory, num_slots, tile, capacity)


@dataclass(frozen=True, slots=True)
class PassResult:
    outputs: list[Output]
    routing: list[Routing]  # per MoE layer [rows, top_k]


def run_pass(
    decoder: Model,
    store: ExpertStore,
    tokens: Sequence[int],
    position: int,
    num_outputs: int | None = None,
    wave: int = 64,
    reverse: bool = False,
) -> PassResult:
    """One target pass; every wave of `wave` experts is loaded into slots just before it runs."""
    target = decoder.target_pass(tokens, position, len(tokens) if num_outputs is None else num_outputs)
    arena: SlotArena = decoder.arena  # type: ignore[attr-defined]
    all_routing = []
    for layer in range(decoder.num_layers):
        routing = target.attend_and_route(layer)
        if routing is None:
            continue
        all_routing.append(routing)
        experts = sorted(np.unique(routing).tolist(), reverse=reverse)
        size = min(wave, arena.num_slots)
        for begin in range(0, len(experts), size):
            chunk = experts[begin : begin + size]
            slots = list(range(len(chunk)))
            if reverse:
                slots = [arena.num_slots - 1 - slot for slot in slots]
            for expert, slot in zip(chunk, slots, strict=True):
                arena.write(slot, store.payload(ExpertId(layer - decoder.num_dense_layers, expert)))
            target.run_experts(layer, chunk, slots)
        target.combine(layer)
    return PassResult(list(target.outputs()), all_routing)
