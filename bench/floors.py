"""Floors of the bench: the fewest bytes that a step, a pass or a layer moves."""

from __future__ import annotations

from dataclasses import dataclass

from specter.models.spec import ModelSpec

HBM_BYTES_PER_S = 4.3e12  # copy ceiling of an H200, read plus written bytes; measured again beside every table
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Device-memory bytes of one pass of `spec` in BF16 at a KV length, every weight read once."""

    spec: ModelSpec
    kv_len: int

    @property
    def shared(self) -> int:
        """Everything but routed experts: all matrices except the embedding, and the latents of every layer."""
        spec = self.spec
        weights = spec.non_expert_params - spec.vocab * spec.hidden
        latents = spec.num_layers * self.kv_len * spec.kv_width
        return BF16_BYTES * (weights + latents)

    def draft(self, int4_expert_bytes: float) -> float:
        """One draft step: top-k INT4 experts in every MoE layer."""
        return self.shared + self.spec.num_moe_layers * self.spec.top_k * int4_expert_bytes

    def target(self, num_experts: float) -> float:
        """A target pass that reads `num_experts` distinct BF16 experts, over all MoE layers."""
        return self.shared + num_experts * BF16_BYTES * self.spec.expert_params


def ms_at(num_bytes: float, bytes_per_s: float = HBM_BYTES_PER_S) -> float:
    return num_bytes / bytes_per_s * 1e3
