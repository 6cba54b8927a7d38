"""A loaded model that continues one prompt after the other; its expert cache stays warm in between."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from specter.config import SamplingConfig
from specter.engine import Engine
from specter.errors import SpecterError
from specter.models.cpu.live import LiveModel
from specter.models.rope import check_prompt
from specter.progress import make_progress
from specter.records import Generation, OnCommit
from specter.resolve import ResolvedRun

if TYPE_CHECKING:
    from specter.models.cuda.model import CudaModel

GREEDY = SamplingConfig("greedy")
MAX_SEED = 2**63 - 1


class Served(Protocol):
    """A loaded model: `LiveModel` or `CudaModel`."""

    notes: dict[str, str]

    def serving(self, run: ResolvedRun, longest: int) -> AbstractContextManager[Engine]: ...

    def set_sampling(self, engine: Engine, sampling: SamplingConfig) -> None: ...


def load_model(run: ResolvedRun, console: Console) -> LiveModel | CudaModel:
    """The model on the clock of the run."""
    if run.config.clock == "device":
        from specter.models.cuda.model import CudaModel  # kernels take seconds to import, and a GPU to run

        return CudaModel.load(run, console)
    with make_progress(console) as progress:
        return LiveModel.load(run, progress)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a generation took. Times are on the run's clock."""

    ttft_ms: float
    tpot_ms: float | None  # None: prefill's token alone
    num_rounds: int
    acceptance: float | None  # accepted drafts / examined drafts; None without a draft
    hit_rate: float | None  # experts that were resident when needed; None where routing is not read
    link_bytes: int  # behind prefill

    @classmethod
    def of(cls, generation: Generation) -> Usage:
        records = generation.rounds

        def total(*names: str) -> int:
            return sum(getattr(record, name) for record in records for name in names)

        accepted = total("accepted_len")
        examined = accepted + sum(record.accepted_len < record.draft_len for record in records)
        needed = total("num_hits", "num_late_hits", "num_misses")
        decoded = len(generation.tokens) - 1
        return cls(
            ttft_ms=generation.prefill_end_ms - generation.start_ms,
            tpot_ms=(records[-1].end_ms - generation.prefill_end_ms) / decoded if decoded else None,
            num_rounds=len(records),
            acceptance=accepted / examined if examined else None,
            hit_rate=total("num_hits") / needed if needed else None,
            link_bytes=total("prefetch_bytes", "fetch_bytes", "writeback_bytes"),
        )


class Generator:
    """Continues prompts on one engine, one at a time. `opened` makes it.

    Attributes:
        run: what it runs; its sampling, K and new tokens are the defaults of a request.
        notes: provenance and degradations of the loaded model.
    """

    def __init__(self, model: Served, run: ResolvedRun, engine: Engine) -> None:
        self.run, self.notes = run, model.notes
        self._model, self._engine = model, engine

    @property
    def capacity(self) -> int:
        """Tokens of a prompt and its continuation together."""
        return self.run.config.kv_capacity

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingConfig = GREEDY,
        stop_ids: Collection[int] = (),
        on_commit: OnCommit = lambda tokens: None,
    ) -> Generation:
        """The continuation of a prompt; `stop_reason` states why it ended.

        Args:
            stop_ids: end the text as its last token, such as a model's end of sequence.
            on_commit: called once a round; True ends the generation, the cache stays warm.
        Raises:
            SpecterError: an empty prompt, one that does not fit the KV cache, or sampling that the clock does not do.
        """
        if not 0 <= sampling.seed <= MAX_SEED:
            raise SpecterError(f"seed {sampling.seed} is out of range", f"use a seed from 0 to {MAX_SEED}")
        check_prompt(self.run.spec, self.capacity, len(prompt))
        self._model.set_sampling(self._engine, sampling)
        # On a device test_lossless_on_device.py has not yet shown that kept KV is bit-equal.
        reuses = self.run.config.clock == "virtual"
        return self._engine.generate(prompt, max_new_tokens, on_commit, stop_ids=stop_ids, reuses_prefix=reuses)


@contextmanager
def opened(run: ResolvedRun, console: Console, longest: int) -> Iterator[Generator]:
    """Loads the model of a run and serves it, in the thread that enters.

    Args:
        longest: tokens of the longest prompt.
    """
    model = load_model(run, console)
    with model.serving(run, longest) as engine:
        yield Generator(model, run, engine)
