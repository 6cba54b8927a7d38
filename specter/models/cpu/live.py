"""A model whose numerics run: checkpoint, store, slots and decoder, ready to serve inputs under any budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress

from specter.build import build_costs, build_model
from specter.config import RunConfig, SystemConfig
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.load_plan import LoadPlan
from specter.memory import num_slots
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.cpu.invariance import invariance_check
from specter.models.spec import ExpertId
from specter.models.weights import DecoderWeights
from specter.quantize.gptq_format import read_directory
from specter.quantize.origin import check_draft_origin
from specter.session import OnCommit, RunResult, run_input
from specter.speculation.sampling import build_sampler

PLAIN = SystemConfig(name="resident", speculative=False, planner="none", eviction="resident")
DTYPE = torch.float32  # what a CPU computes in; the checkpoint's int8 or BF16 values are exact in it


@dataclass(slots=True)
class LiveModel:
    """Weights in memory once, whatever runs on them.

    Attributes:
        notes: provenance and whatever degraded, for every run's env.json.
    """

    decoder: Decoder
    store: ExpertStore
    notes: dict[str, str]

    @classmethod
    def load(cls, config: RunConfig, progress: Progress) -> LiveModel:
        """Loads target and draft as `config` says and checks that this machine computes a row alike anywhere.

        Raises:
            SpecterError: from the checkpoint and quantised directories' strict readers.
        """
        checkpoint = Checkpoint.open(config.model.checkpoint)
        spec = checkpoint.spec
        slot_bytes = num_slots(config, build_costs(config)) * spec.expert_params * DTYPE.itemsize
        plan = LoadPlan.build(checkpoint, DTYPE, config.system.speculative, slot_bytes, config.kv_capacity)
        if config.model.checkpoint_kind == "hub":
            progress.console.print(plan.table())
        plan.check()
        notes = {"checkpoint_digest": checkpoint.digest()}
        draft = None
        if config.system.speculative:
            notes["draft_origin"] = check_draft_origin(Path(config.model.quantized), checkpoint)
            draft = read_directory(Path(config.model.quantized), spec)
            if draft.num_ignored:
                notes["draft_ignores"] = f"{draft.num_ignored} quantised modules besides the routed experts"
        codec = RawCodec(DTYPE, spec.expert_inter, spec.hidden)
        moe_layers = progress.track(range(spec.num_moe_layers), description="load experts")
        store = ExpertStore.read(codec, checkpoint, moe_layers)
        weights = DecoderWeights.load(checkpoint, DTYPE)
        arena = SlotArena(spec.num_experts, codec)
        decoder = Decoder(spec, weights, arena, draft, config.tile_rows, config.kv_capacity)
        report = invariance_check(decoder)
        return cls(decoder, store, notes | {"rowwise": str(report.rowwise)})

    def run(
        self, config: RunConfig, prompt: Sequence[int], warmup: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> RunResult:
        """Runs one input with slots of its own; see `session.run_input`."""
        arena = SlotArena(num_slots(config, build_costs(config)), self.store.codec)
        self.decoder.arena = arena

        def move(expert: ExpertId, slot: int) -> None:
            arena.write(slot, self.store.payload(expert))

        model = build_model(config, self.decoder, self.decoder.twin)
        sampler = build_sampler(config.sampling)
        with torch.inference_mode():
            return run_input(config, model, sampler, prompt, warmup, move, on_commit, foresees=True)

    def agrees_with_plain(
        self, config: RunConfig, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding with everything resident yields the same tokens.

        None where it need not: rejection sampling is lossless in distribution only.
        """
        if config.sampling.kind == "rejection":
            return None
        plain = self.run(replace(config, system=PLAIN, warmup_tokens=0), result.recording.prompt, (), on_commit)
        return plain.generation.tokens == result.generation.tokens
