"""From a resolved run to its engine: policies come from their registries, everything else is passed."""

from __future__ import annotations

from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.cache import ExpertCache
from specter.experts.policies.base import EVICTIONS, PLANNERS, PREDICTORS, Pool, layer_quotas
from specter.experts.residency import Residency
from specter.experts.transfer import TRANSFERS, Backend, Mover, move_nothing
from specter.models.base import Model
from specter.models.spec import ExpertId
from specter.resolve import ResolvedRun
from specter.speculation.accept import Sampler
from specter.speculation.drafts import DRAFTS
from specter.timeline.virtual import VirtualTimeline


def build_engine(run: ResolvedRun, model: Model, sampler: Sampler, backend: Backend | None = None) -> Engine:
    """An engine with an empty cache, or a full one for a system that holds all experts.

    Args:
        backend: by default a `virtual_backend` without payloads.
    Raises:
        SpecterError: the model has other layers or experts than the one charged.
    """
    config, costs, spec = run.config, run.costs, run.spec
    system = config.system
    shape = ("num_layers", "num_dense_layers", "num_experts", "top_k")
    if any(getattr(model, name) != getattr(spec, name) for name in shape):
        raise SpecterError(
            f"{config.model.checkpoint} has other layers or experts than {spec.name}, which it is to be charged as",
            "set model.charged_as to the full-size model that this checkpoint stands for",
        )
    backend = backend or virtual_backend(run)
    transfer = TRANSFERS[system.transfer](backend, costs.payload_bytes, system.num_buffers)
    quotas = layer_quotas(run.num_slots, spec.num_moe_layers)
    pool = Pool(quotas, spec.num_experts, costs.payload_bytes, system.num_staging)
    cache = ExpertCache(Residency(run.num_slots), EVICTIONS[system.eviction](pool), transfer)
    if system.holds_all:
        cache.place([ExpertId(m, e) for m in range(spec.num_moe_layers) for e in range(spec.num_experts)])
    return Engine(
        model,
        sampler,
        cache,
        transfer.timeline,
        costs,
        planner=PLANNERS[system.planner](pool),
        draft_len=config.draft_len,
        predictor=PREDICTORS[system.predictor](),
        has_own_draft=DRAFTS[system.draft].is_own,
    )


def virtual_backend(run: ResolvedRun, move: Mover = move_nothing) -> Backend:
    """A fresh virtual clock of the run's hardware; `move` copies payloads, which a replay does not have."""
    return Backend(VirtualTimeline(run.config.hardware, run.config.trace), move)
