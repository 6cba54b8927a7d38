"""`lru_next_gate`: `lru` that prefetches the next layer's experts by that layer's router on this layer's hidden state.

Faithful to: the usual prefetch of runtimes without a draft (for example arXiv 2312.17238, "speculative loading"; see
mixtral_offloading). The residual stream changes slowly from layer to layer, so the next layer's norm and router on the
current hidden state (attention added, experts not yet) predict most of its experts one layer ahead.
Departing where: no known departure; copy stream, slots and kernels are those of every system here. The prediction
is charged as one more router product per layer; on a device it is one, in a graph of its own. All of the top-k are
fetched behind the current layer's misses, and predicted experts are protected until their layer has run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from specter.experts.policies.base import PREDICTORS, NextLayerPredictor, Plan
from specter.models.base import Routing
from specter.models.spec import ExpertId


@PREDICTORS.register("next_gate")
class NextGate(NextLayerPredictor):
    """Plans the next layer's loads from its predicted routing: by rows that name an expert, then by rank.

    Args:
        num_guesses: how many of a row's experts to load; None for all.
    """

    is_active = True

    def __init__(self, num_guesses: int | None = None) -> None:
        self._num_guesses = num_guesses

    def plan(self, layer: int, predicted: Routing, num_experts: int, is_present: Callable[[ExpertId], bool]) -> Plan:
        by_rank = predicted[:, : self._num_guesses].T.ravel()
        experts, first, counts = np.unique(by_rank, return_index=True, return_counts=True)
        protect = np.zeros((layer + 1, num_experts), np.bool_)
        protect[layer, experts] = True
        ordered = [ExpertId(layer, int(experts[i])) for i in np.lexsort((first, -counts))]
        return Plan([expert for expert in ordered if not is_present(expert)], protect)


PREDICTORS.register("next_gate_2")(partial(NextGate, num_guesses=2))
