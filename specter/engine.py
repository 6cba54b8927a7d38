"""The engine: draft, prefetch, verify, accept, record. Read this file first.

It holds no tensor arithmetic and no policy. The model computes, the sampler chooses tokens, the planner
chooses what to prefetch, the cache tracks which expert is in which slot, and the timeline keeps time.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specter.errors import SpecterError
from specter.experts.cache import ExpertCache, Wave
from specter.experts.lookahead import LookaheadBuffer
from specter.experts.policies.base import NextLayerPredictor, Planner
from specter.models.base import Model, Output, Proposal, Routing, TargetPass
from specter.records import Generation, OnCommit, PlanRecord
from specter.rounds import FinishedRound, Window
from specter.speculation.accept import Sampler, shared_len, through_stop
from specter.speculation.depth import Depth
from specter.timeline.base import Event, Timeline
from specter.timeline.costs import CostModel


def check_length(prompt_len: int, max_new_tokens: int, kv_capacity: int) -> None:
    """Raises SpecterError for an empty prompt, or one that does not fit the KV cache with the new tokens."""
    if prompt_len == 0:
        raise SpecterError("the prompt has no tokens", "give a text, or another data set input")
    if prompt_len + max_new_tokens > kv_capacity:
        raise SpecterError(
            f"{prompt_len} prompt and {max_new_tokens} new tokens exceed kv_capacity={kv_capacity}",
            f"set kv_capacity={prompt_len + max_new_tokens} or more, or shorten the prompt with prompt_tokens=...",
        )


@dataclass(eq=False)
class Engine:
    """One system: a model, a sampler and policies for moving experts, on one timeline.

    Args:
        planner: plans loads during drafting. predictor: plans loads one layer ahead.
        depth: the K of each round; 0 decodes plainly, one token a round.
        has_own_draft: the draft has a KV cache of its own, and is charged for filling it.
        copies_kv: the draft has a copy of the target's KV, made anew in every round. by_token: verification runs the
            experts of one token after the other. Both show what the alternative costs, and are charged only.

    Attributes:
        generation: the current or last one; its rounds survive an interruption.
    """

    model: Model
    sampler: Sampler
    cache: ExpertCache
    timeline: Timeline
    costs: CostModel
    planner: Planner
    depth: Depth
    predictor: NextLayerPredictor
    has_own_draft: bool = False
    copies_kv: bool = False
    by_token: bool = False
    generation: Generation | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.lookahead = LookaheadBuffer(self._num_moe_layers, self.model.num_experts)
        self._draft_seen = 0  # positions in an own draft's KV
        self._text: list[int] = []  # tokens whose KV the target has, between generations
        self._staged: tuple[list[Event], list[Event]] = [], []  # last uses of the halves of the staging area
        self._is_interrupted = False
        self._unrecorded: FinishedRound | None = None
        self._plans: list[PlanRecord] = []  # of this round

    def fork(self, model: Model) -> Engine:
        """Copies the engine in the state after its last generation, over `model`; for the virtual clock only."""
        shared = {id(one): one for one in (self.costs, self.generation)}
        return copy.deepcopy(self, shared | {id(self.model): model})

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        on_commit: OnCommit = lambda tokens: None,
        stop_ids: Collection[int] = (),
        reuses_prefix: bool = False,
    ) -> Generation:
        """Generates `max_new_tokens` tokens after `prompt`, or fewer where a token or the caller ends the text.

        Args:
            on_commit: called with the tokens of every commit, prefill's first token included.
            stop_ids: tokens that end the text, such as EOS. The first one is its last token; those that its round
                committed behind it are dropped.
            reuses_prefix: computes only what `prompt` does not share with the last text, whose KV is kept.
        Raises:
            SpecterError: an empty prompt, or one that does not fit the KV cache with the new tokens.

        Both lanes are idle when it returns. After any exception, Ctrl-C included, `self.generation` keeps the finished
        rounds, and the next call starts with an empty cache.
        """
        check_length(len(prompt), max_new_tokens, self.costs.kv_capacity)
        if self._is_interrupted:
            self.timeline.drain()  # copies into slots may still be under way
            self.cache.clear()
        self._is_interrupted = True  # until this generation is complete
        kept = shared_len(self._text, prompt[:-1]) if reuses_prefix else 0
        if kept:
            self.model.crop(kept)
        else:
            self.model.reset()
        self._text, self._draft_seen = [], min(self._draft_seen, kept)
        self._unrecorded = None
        self.depth.begin()
        generation = self.generation = Generation(self.timeline.clock, len(prompt), cached_len=kept)
        try:
            tokens = [*prompt, self._prefill(generation, prompt)]
            new_tokens, end = tokens[-1:], len(prompt) + max_new_tokens
            while not (is_ended := on_commit(new_tokens)) and tokens[-1] not in stop_ids and len(tokens) < end:
                new_tokens = self.run_round(tokens, end - len(tokens), stop_ids)
            generation.tokens = tokens[len(prompt) :]
            generation.stop_reason = "eos" if tokens[-1] in stop_ids else "stop" if is_ended else "length"
        except BaseException:
            with suppress(SpecterError, RuntimeError):  # a failed device cannot read its times
                self._record()
            raise
        self._record()
        self.timeline.drain()  # copies of the last round's plan may be under way
        self._text, self._is_interrupted = tokens[:-1], False
        return generation

    def run_round(self, committed: list[int], remaining: int, stop_ids: Collection[int] = ()) -> list[int]:
        """One round: appends 1 to K+1 tokens to `committed`, never more than `remaining`, and returns them.
        None is behind a token of `stop_ids`.

        The target's KV lacks the last committed token. The round is recorded while the device runs the next draft or
        pass, so that the device does not idle.
        """
        begin = self._window()
        self.cache.begin_round()
        present = partial(self.cache.present, self._num_moe_layers, self.model.num_experts)
        proposals, batches = self.draft(committed, self.depth.choose(remaining - 1, present))
        draft_end_ns = self.timeline.now_ns()

        barrier = self.planner.barrier(batches)
        if barrier:
            self.cache.note_barrier()
        tokens = [committed[-1], *(proposal.token for proposal in proposals)]
        outputs = self.target_pass(tokens, len(committed) - 1, num_outputs=len(tokens), after=barrier)
        verified = self.sampler.verify(proposals, outputs, len(committed))
        new_tokens = through_stop(verified, stop_ids)
        accepted_len = len(verified) - 1
        self._observe_copies(batches)
        self.depth.verified(len(proposals), accepted_len)

        committed += new_tokens
        self.model.crop(len(committed) - 1)
        self._draft_seen = min(self._draft_seen, len(committed) - 1)
        accepted_len = min(accepted_len, len(new_tokens))  # an accepted stop token has no bonus token behind it
        self._unrecorded = FinishedRound(
            begin, draft_end_ns, self._window(), len(proposals), accepted_len=accepted_len, new_len=len(new_tokens),
            plans=self._plans,
        )  # fmt: skip
        return new_tokens

    def draft(self, committed: Sequence[int], draft_len: int) -> tuple[list[Proposal], list[list[Event]]]:
        """Drafts `draft_len` tokens; returns them and the copies of the planner's `at_once` plans, by plan."""
        self.lookahead.clear()
        self._plans = []
        if draft_len == 0:
            return [], []
        timeline, planner, position = self.timeline, self.planner, len(committed) - 1
        self.model.begin_draft(committed[-1], position, self.sampler.propose)
        num_rows = [1] * draft_len
        if self.has_own_draft:  # its first step also processes the tokens that its KV lacks
            num_rows[0] += position - self._draft_seen
            self._draft_seen = position + draft_len
        if self.copies_kv:
            timeline.compute(self.costs.copy_kv(position), lambda: None)
        # All steps are issued at once: each starts from its predecessor's token on the device, without the host.
        steps = [timeline.compute(self.costs.draft_step(rows), self.model.draft_step) for rows in num_rows]
        batches: list[list[Event]] = []
        num_read = 0
        planner.begin_round(draft_len)
        for num_drafted, (_, done) in enumerate(steps, start=1):
            if not planner.is_boundary(num_drafted):
                continue
            self._wait(done)  # sync: the step's routing
            is_last = num_drafted == draft_len
            if not is_last and planner.skips_boundary(partial(timeline.is_done, steps[num_drafted][1])):
                continue
            for step, _ in steps[num_read:num_drafted]:
                self.lookahead.add(step.routing)
            num_read, counts = num_drafted, self.lookahead.counts
            if num_drafted > 1:
                planner.observe_step(timeline.elapsed_ns(steps[num_drafted - 2][1], done) / 1e6)
            plan = planner.plan(num_drafted, counts, self.cache.present(*counts.shape))
            self._plans.append(PlanRecord(num_drafted, plan.phase, len(plan.loads), plan.chunk_len))
            if copies := self.cache.submit(plan, known=done):
                batches.append(copies)
        self._record()  # the last round; its events have completed by now
        self._wait(steps[-1][1])  # sync: the draft tokens
        return [step.proposal for step, _ in steps], batches

    def target_pass(
        self, tokens: Sequence[int], position: int, num_outputs: int, after: Iterable[Event] = ()
    ) -> Sequence[Output]:
        """One pass of the target over `tokens`, layer by layer; prefill, plain decoding and verification alike."""
        costs, compute = self.costs, self.timeline.compute
        target = self.model.target_pass(tokens, position, num_outputs)
        tiles = costs.num_tiles(len(tokens))
        for layer in range(self.model.num_layers):
            attend_and_route = partial(target.attend_and_route, layer)
            routing, done = compute(costs.attend_and_route(layer, tiles), attend_and_route, after=after)
            after = ()
            if layer == 0:
                self._record()  # the last round, if drafting has not
            if routing is None:
                continue
            moe_layer = layer - self.model.num_dense_layers
            predicted = None
            if self.predictor.is_active and layer + 1 < self.model.num_layers:
                predicted, done = compute(costs.predict_next(tiles), partial(target.predict_next, layer))
            if not costs.one_graph:
                self._wait(done)  # sync: the host needs this layer's routing to issue fetches
            counts = np.bincount(routing.ravel(), minlength=self.model.num_experts)
            self.depth.demand(moe_layer, counts, len(tokens))
            for needed in self._demands(routing, counts, num_outputs):
                for wave in self.cache.waves(moe_layer, needed, known=done):
                    self._run_wave(target, layer, wave, tiles if needed is counts else 1)
            if predicted is not None:  # behind the misses of this layer
                num_experts, is_present = self.model.num_experts, self.cache.is_present
                plan = self.predictor.plan(moe_layer + 1, predicted, num_experts, is_present)
                self.cache.submit(plan, known=done)
            compute(costs.combine(tiles), partial(target.combine, layer))
        outputs, done = compute(costs.head(num_outputs), target.outputs)
        self._wait(done)
        return outputs

    # -- inside --------------------------------------------------------------------------------

    @property
    def _num_moe_layers(self) -> int:
        return self.model.num_layers - self.model.num_dense_layers

    def _prefill(self, generation: Generation, prompt: Sequence[int]) -> int:
        """One pass over the prompt behind its kept KV, recorded in `generation`; returns the first token."""
        begin = self._window()
        self.cache.begin_round()
        outputs = self.target_pass(prompt[generation.cached_len :], generation.cached_len, num_outputs=1)
        [first] = self.sampler.verify([], outputs, len(prompt))
        end = self._window()
        generation.start_ms, generation.prefill_end_ms = begin.ns / 1e6, end.ns / 1e6
        self.cache.queue.settle(end.num_needs)  # prefill's
        generation.prefill_bytes = end.mark.copied_bytes - begin.mark.copied_bytes
        generation.residents = list(self.cache.residency.experts())
        return first

    def _demands(self, routing: Routing, counts: NDArray[np.int64], num_outputs: int) -> Sequence[NDArray[np.int64]]:
        """What a layer's experts are run for, in order: all rows together, or the rows of a verification in turn."""
        if not self.by_token or num_outputs == 1:
            return [counts]
        return [np.bincount(row, minlength=len(counts)) for row in routing]

    def _run_wave(self, target: TargetPass, layer: int, wave: Wave, tiles: int) -> None:
        """Computes a wave; its slots are free behind the work that reads them: with a codec that is the decode."""
        costs, compute, experts = self.costs, self.timeline.compute, wave.experts
        work = costs.experts(len(experts), tiles)
        if not costs.decodes:
            _, read = compute(work, partial(target.run_experts, layer, experts, wave.indices), after=wave.after)
        else:
            # The staging area's halves in turn: one is decoded to while the other is read.
            decode, after = partial(target.decode, layer, experts, wave.indices), [*wave.after, *self._staged[0]]
            _, read = self.timeline.decode(costs.decode(len(experts)), decode, after)
            _, ran = compute(work, partial(target.run_experts, layer, experts, range(len(experts))), after=(read,))
            self._staged = self._staged[1], [ran]
        self.cache.release(wave, read)

    def _wait(self, event: Event) -> None:
        """Blocks the host until `event`, and issues planned copies meanwhile."""
        while (copy := self.cache.feed()) is not None and not self.timeline.is_done(event):
            self.timeline.wait_first([event, copy])
        self.timeline.wait(event)

    def _observe_copies(self, batches: Sequence[Sequence[Event]]) -> None:
        """Reports the speed of each batch to the planner. Call it after verification, which waits for them."""
        for batch in batches:
            if len(batch) > 1:
                copy_ms = self.timeline.elapsed_ns(batch[0], batch[-1]) / 1e6
                self.planner.observe_copies((len(batch) - 1) * self.costs.payload_bytes, copy_ms)

    def _window(self) -> Window:
        counters = replace(self.cache.counters)
        return Window(self.timeline.now_ns(), self.timeline.mark(), counters, self.cache.queue.num_met())

    def _record(self) -> None:
        """Records the finished round, if one is not recorded yet."""
        if (one := self._unrecorded) is None:
            return
        assert self.generation is not None
        lanes = one.lanes(self.timeline.totals_at)
        self._unrecorded = None  # before the append: an interruption here must not record the round twice
        need_ns = self.cache.queue.settle(one.end.num_needs)
        record = one.record(len(self.generation.rounds), lanes, need_ns, self._num_moe_layers)
        self.generation.rounds.append(record)
        self.depth.observe(record)
