"""A run's configuration, costs and slots, resolved once and passed together. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specter.config import RunConfig
from specter.errors import SpecterError
from specter.memory import fit, num_slots
from specter.models.full_size import FULL_SIZE
from specter.models.hub_config import read_spec
from specter.models.spec import ModelSpec
from specter.speculation.drafts import DRAFTS
from specter.timeline.costs import CostModel


@dataclass(frozen=True)
class ResolvedRun:
    """A checked configuration, the costs of the model that it charges for, and the slots that its budget buys."""

    config: RunConfig
    costs: CostModel
    num_slots: int

    @property
    def spec(self) -> ModelSpec:
        """The full-size model charged."""
        return self.costs.spec

    def fit(self) -> dict[str, int | bool]:
        """Device bytes by part, and whether they fit; see `memory.fit`."""
        return fit(self.costs, self.config.system, self.num_slots, self.config.hardware)


def resolve(config: RunConfig) -> ResolvedRun:
    """Resolves a checked configuration.

    Raises:
        SpecterError: an unknown `charged_as` or budget tier, or a budget below two slots.
        DoesNotFit: the memory policy leaves this system fewer than two slots.
    """
    costs = build_costs(config)
    return ResolvedRun(config, costs, num_slots(config.model, config.budget, config.system, costs))


def build_costs(config: RunConfig) -> CostModel:
    """Costs of the model charged: a full-size one, or the checkpoint `itself`. Raises SpecterError if unknown."""
    name = config.model.charged_as
    spec = read_spec(Path(config.model.checkpoint)) if name == "itself" else FULL_SIZE.get(name)
    if spec is None:
        raise SpecterError(f"model.charged_as={name!r} is unknown", f"use one of: {', '.join(FULL_SIZE)}, itself")
    draft_bits = DRAFTS[config.system.draft].weight_bits
    return CostModel(spec, config.tile_rows, config.kv_capacity, draft_shared_bits=draft_bits)


def check_paths(config: RunConfig) -> None:
    """Raises SpecterError, before anything is loaded, for a path that does not exist."""
    for key, path in (("model.checkpoint", config.model.checkpoint), ("model.tokenizer", config.model.tokenizer)):
        if not Path(path).exists():
            raise SpecterError(
                f"{key}={path} does not exist", "run from the root of the repository, or correct the path"
            )
    if config.system.speculative and not Path(config.model.quantized).is_dir():
        raise SpecterError(
            f"the draft model.quantized={config.model.quantized} does not exist",
            f"make it: python -m specter.quantize checkpoint={config.model.checkpoint} out={config.model.quantized}",
        )
