"""Jobs one after the other on one engine: a bounded line of waiting ones, and the loop that runs them."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.generation import Usage
from specter.records import Generation, OnCommit
from specter.serving.metrics import Metrics
from specter.text.stream import TextStream


class Busy(Exception):
    """The line is full."""


class Closed(Exception):
    """The server ends."""


class Generates(Protocol):
    """What runs a job: `specter.generation.Generator`."""

    @property
    def capacity(self) -> int: ...

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: SamplingConfig,
        stop_ids: frozenset[int],
        on_commit: OnCommit,
    ) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job's text."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, whose KV was there
    acceptance: float | None


Event = str | Done | Exception  # pieces of text, then one of the others


@dataclass(eq=False, slots=True)
class Job:
    """A text to generate.

    Args:
        emit: receives the events, in the thread of the engine.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingConfig
    stop_ids: frozenset[int]
    stream: TextStream
    emit: Callable[[Event], None]
    is_cancelled: bool = False
    submitted_s: float = field(default_factory=monotonic)


class Worker:
    """Runs jobs in the order of their submission, in the thread that calls `run`.

    Args:
        max_waiting: jobs in the line, beside the one that runs.
    """

    def __init__(self, generator: Generates, max_waiting: int, metrics: Metrics) -> None:
        self.generator, self.max_waiting = generator, max_waiting
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self.failure: str | None = None  # of the last job, unless it was the request's fault
        metrics.watch(lambda: len(self._waiting), lambda: int(self._running is not None))

    def submit(self, job: Job) -> None:
        """Puts a job at the end of the line. Raises Busy or Closed."""
        with self._changed:
            if self._is_closed:
                raise Closed
            if len(self._waiting) >= self.max_waiting and (self._waiting or self._running):
                raise Busy
            self._waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Takes a job out of the line, or ends it with its round. Does nothing to a job that has ended."""
        with self._changed:
            job.is_cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.ended("cancelled")

    def close(self, *, cancels: bool = False) -> None:
        """Accepts no more jobs; `run` returns when those in the line are done, or with the round if `cancels`."""
        with self._changed:
            self._is_closed = True
            if cancels:
                for job in (*self._waiting, self._running):
                    if job is not None:
                        job.is_cancelled = True
            self._changed.notify_all()

    def run(self) -> None:
        """Runs jobs until `close`."""
        try:
            while (job := self._next()) is not None:
                self._metrics.waited(monotonic() - job.submitted_s)
                job.emit(self._answer(job))
        finally:
            self.close()
            with self._changed:
                left = [job for job in (self._running, *self._waiting) if job is not None]
                self._running, self._waiting = None, deque()
            for job in left:  # there are some only if the loop was interrupted
                job.emit(Closed())

    def _next(self) -> Job | None:
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _answer(self, job: Job) -> Done | Exception:
        """Generates the text of a job; returns its last event."""
        stream = job.stream

        def commit(tokens: list[int]) -> bool:
            if not job.is_cancelled and (piece := stream.add(tokens)):
                job.emit(piece)
            return job.is_cancelled or stream.stop_reason is not None

        if job.is_cancelled:
            self._metrics.ended("cancelled")
            return Closed()
        begin = monotonic()
        try:
            generation = self.generator.generate(
                job.prompt, job.max_new_tokens, job.sampling, stop_ids=job.stop_ids, on_commit=commit
            )
            if piece := stream.finish():
                job.emit(piece)
        except SpecterError as error:
            self._metrics.ended("refused")
            return error
        except Exception as error:  # one request must not end the server
            self.failure = repr(error)
            self._metrics.ended("failed")
            traceback.print_exc()
            return error
        self.failure = None
        self._metrics.generated(generation, stream.num_tokens, monotonic() - begin)
        self._metrics.ended("cancelled" if job.is_cancelled else "answered")
        ran_out = generation.stop_reason == "length" and stream.stop_reason is None
        return Done(
            finish_reason="length" if ran_out else "stop",
            prompt_tokens=len(job.prompt),
            completion_tokens=stream.num_tokens,
            cached_tokens=generation.cached_len,
            acceptance=Usage.of(generation).acceptance,
        )
