"""How many tokens a round drafts: a fixed K, or the K with the least expected time per token (`k=auto`).

Policies in plain Python and numpy: measurements in, a number out. The same records give the same depths, so that a
replay chooses as its live run did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter.records import RoundRecord
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware

AUTO = "auto"
MAX_AUTO = 32  # the paper's K_max, from its acceptance
CAPTURED = (
    4,
    8,
    12,
    16,
    24,
    32,
)  # a device captures passes of these drafts, and pads the others: graphs take time to make
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)

_NEW = 0.3  # weight of a new measurement in moving averages
_MEMORY_ROWS = 64.0  # rows after which an expert's use counts 1/e
_MEMORY_TOKENS = (12.0, 100.0)  # examined draft tokens after which an acceptance counts 1/e
_PRIOR_ACCEPTANCE, _PRIOR_TOKENS = 0.9, (2.0, 4.0)  # until rounds have shown it
_MOST_ACCEPTANCE = 0.999
_PROBE_ROUNDS, _PROBE_LEN = 8, 2  # plain rounds measure no acceptance: after so many, one drafts so many tokens


class Depth:
    """Chooses the draft length of every round. This base class drafts `max_len` tokens; its hooks do nothing."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len

    def choose(self, limit: int, present: Callable[[], NDArray[np.bool_]]) -> int:
        """The draft length of the round that begins, at most `limit`.

        Args:
            present: returns the experts that are resident or loading, [MoE layers, E].
        """
        return min(self.max_len, limit)

    def begin(self) -> None:
        """A generation begins; the last one may have been interrupted."""

    def demand(self, layer: int, counts: NDArray[np.int64], num_rows: int) -> None:
        """Receives the target's routing of MoE layer `layer`: rows of the pass that chose each expert [E]."""

    def verified(self, draft_len: int, accepted_len: int) -> None:
        """Receives the acceptance of a round."""

    def observe(self, record: RoundRecord) -> None:
        """Receives the measurements of a round, in order; a device has them one round late."""


class Acceptance:
    """Running probability that a draft token is accepted: the larger of a short and of a long memory's.

    Texts change between passages that the draft follows and others. A draft that is too long costs little, one that is
    too short a whole round, so the estimate is the hopeful one. Positions differ too little for estimates of their own.
    """

    def __init__(self) -> None:
        self._examined: NDArray[np.float64] = np.array(_PRIOR_TOKENS)
        self._accepted: NDArray[np.float64] = self._examined * _PRIOR_ACCEPTANCE
        self._keeps: NDArray[np.float64] = np.exp(-1 / np.array(_MEMORY_TOKENS))  # after one token

    def add(self, draft_len: int, accepted_len: int) -> None:
        num_examined = min(accepted_len + 1, draft_len)
        keep: NDArray[np.float64] = self._keeps**num_examined
        self._examined = self._examined * keep + num_examined
        self._accepted = self._accepted * keep + accepted_len

    def expected_tokens(self, lens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens that rounds of these draft lengths are expected to commit."""
        share = min(float((self._accepted / self._examined).max()), _MOST_ACCEPTANCE)
        powers: NDArray[np.float64] = np.power(share, lens + 1.0)
        return (1 - powers) / (1 - share)


@dataclass(slots=True)
class _Average:
    """A moving average of measurements over predictions, starting at 1."""

    value: float = 1.0

    def add(self, measured: float, predicted: float) -> None:
        if predicted > 0:
            self.value += _NEW * (measured / predicted - self.value)


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What a round was expected to need; its measurements correct the next forecasts."""

    draft_len: int
    union: float  # distinct experts, summed over layers
    union_slope: float  # d union / d growth
    loads: float
    verify_ms: float
    round_ms: float


class AutoDepth(Depth):
    """The K of least expected time per token (decision 0015).

    tokens(K): `Acceptance`. With f the share of recent rows that chose an expert, a pass over n rows needs it with
    probability 1 - (1 - f)^(n^growth). `growth` below 1 states that rows of one pass resemble each other; it follows
    from the unions measured. Summed over all experts these give the union, over the absent ones the loads. Then

        time(K) = K draft + max(verify(union), loads copy - overlap(K)) + rest:

    copies start with the first draft step, and verification ends with its own work or with the last copy. Copies
    overlap drafting until the slots for experts loaded ahead are full, which shows in the rounds measured. The shapes
    of `verify`, `draft` and `copy` come from the cost model, their scales and `rest` from measurements.
    """

    def __init__(self, costs: CostModel, hardware: Hardware, max_len: int = MAX_AUTO) -> None:
        super().__init__(max_len)
        spec = costs.spec
        self._lens = np.array([k for k in CANDIDATES if k <= max_len])
        self._acceptance = Acceptance()
        self._uses = np.zeros((spec.num_moe_layers, spec.num_experts))
        self._rows = np.zeros((spec.num_moe_layers, 1))
        self._growth = 0.9
        self._draft_ms = hardware.compute_ns(costs.draft_step()) / 1e6
        self._copy_ms = hardware.copy_ns(costs.payload_bytes) / 1e6
        self._pass_ms = np.array([_pass_ns(costs, hardware, costs.num_tiles(int(k) + 1)) / 1e6 for k in self._lens])
        self._expert_ms = _expert_ns(costs, hardware) / 1e6
        self._verify_scale, self._loads_scale = _Average(), _Average()
        self._rest_ms = 0.0
        self._num_plain = 0  # rounds with K = 0 in a row
        self._most_overlap_ms = np.inf
        self._forecasts: deque[_Forecast] = deque()

    def choose(self, limit: int, present: Callable[[], NDArray[np.bool_]]) -> int:
        num = int(np.searchsorted(self._lens, min(limit, self.max_len), side="right"))
        lens = self._lens[:num]
        absent = ~present()
        with np.errstate(divide="ignore"):
            log_misses = np.log1p(-np.minimum(self._uses / np.maximum(self._rows, 1e-9), 1.0))  # log(1 - f)
        exponents = (lens + 1.0) ** self._growth
        needed = -np.expm1(exponents[:, None, None] * log_misses)
        unions, loads = needed.sum((1, 2)), needed[:, absent].sum(1) * self._loads_scale.value
        verify_ms = (self._pass_ms[:num] + unions * self._expert_ms) * self._verify_scale.value
        overlap_ms = np.minimum(np.maximum(lens - 1, 0) * self._draft_ms, self._most_overlap_ms)
        link_ms = loads * self._copy_ms - overlap_ms
        round_ms = lens * self._draft_ms + np.maximum(verify_ms, link_ms)
        per_token = (round_ms + self._rest_ms) / self._acceptance.expected_tokens(lens)
        best = int(per_token.argmin())
        self._num_plain = 0 if lens[best] or self._num_plain == _PROBE_ROUNDS else self._num_plain + 1
        if not lens[best] and not self._num_plain:
            best = int(np.searchsorted(lens, min(_PROBE_LEN, int(lens[-1]))))
        # Slope of the union in `growth`; (1 - f)^n log(1 - f) is 0 where f is 0 or 1.
        finite = np.where(np.isfinite(log_misses), log_misses, 0.0)
        slope = -float((np.exp(exponents[best] * finite) * finite).sum()) * exponents[best] * np.log(lens[best] + 1.0)
        self._forecasts.append(
            _Forecast(
                int(lens[best]), float(unions[best]), slope, float(loads[best]) / self._loads_scale.value,
                float(verify_ms[best]) / self._verify_scale.value, float(round_ms[best]),
            )
        )  # fmt: skip
        return int(lens[best])

    def begin(self) -> None:
        self._forecasts.clear()

    def demand(self, layer: int, counts: NDArray[np.int64], num_rows: int) -> None:
        keep = np.exp(-num_rows / _MEMORY_ROWS)
        self._uses[layer] = keep * self._uses[layer] + counts
        self._rows[layer] = keep * self._rows[layer] + num_rows

    def verified(self, draft_len: int, accepted_len: int) -> None:
        self._acceptance.add(draft_len, accepted_len)

    def observe(self, record: RoundRecord) -> None:
        forecast = self._forecasts.popleft()
        num_layers = len(self._uses)
        num_loads = record.num_prefetched + record.num_misses
        draft_ms, round_ms = record.draft_end_ms - record.start_ms, record.end_ms - record.start_ms
        if record.draft_len:
            self._draft_ms += _NEW * (draft_ms / record.draft_len - self._draft_ms)
        if num_loads:
            self._copy_ms += _NEW * (record.link_busy_ms / num_loads - self._copy_ms)
        if forecast.union_slope > 0:
            error = record.union_mean * num_layers - forecast.union
            self._growth = float(np.clip(self._growth + _NEW * error / forecast.union_slope, 0.3, 1.3))
        self._loads_scale.add(num_loads, max(forecast.loads, 1.0))
        self._verify_scale.add(record.end_ms - record.draft_end_ms - record.stall_ms, forecast.verify_ms)
        if record.draft_len > 1 and record.link_busy_ms > draft_ms:
            self._learn_overlap(draft_ms * (1 - 1 / record.draft_len), draft_ms + record.link_busy_ms - round_ms)
        self._rest_ms += _NEW * (max(round_ms - forecast.round_ms, 0.0) - self._rest_ms)

    def _learn_overlap(self, possible_ms: float, measured_ms: float) -> None:
        """Copies under way while drafting: of a round that is bound by the link."""
        measured_ms = max(measured_ms, 0.0)
        if measured_ms > 0.8 * possible_ms:
            self._most_overlap_ms = max(self._most_overlap_ms, measured_ms)
        elif np.isinf(self._most_overlap_ms):
            self._most_overlap_ms = measured_ms
        else:
            self._most_overlap_ms += _NEW * (measured_ms - self._most_overlap_ms)


def _pass_ns(costs: CostModel, hardware: Hardware, tiles: int) -> int:
    """A pass of the target without its routed experts."""
    spec = costs.spec
    layers = sum(hardware.compute_ns(costs.attend_and_route(layer, tiles)) for layer in range(spec.num_layers))
    ends = spec.num_moe_layers * hardware.compute_ns(costs.combine(tiles))
    return layers + ends + hardware.compute_ns(costs.head(tiles * costs.tile_rows))


def _expert_ns(costs: CostModel, hardware: Hardware) -> float:
    """One more expert in a wave, with its decoding."""
    few, many = 4, 12
    works = [costs.experts, costs.decode] if costs.decodes else [costs.experts]
    return sum(hardware.compute_ns(work(many)) - hardware.compute_ns(work(few)) for work in works) / (many - few)
