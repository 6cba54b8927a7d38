"""Servers for tests: over a generator that a test drives, or over a stand-in; on a free port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specter.config import SamplingConfig
from specter.records import Generation, OnCommit, RoundRecord, StopReason
from specter.serving.app import Service, build_app
from specter.serving.metrics import Metrics
from specter.serving.server import Limits, bind, run
from specter.serving.worker import Generates, Worker
from specter.text.chat import ChatTemplate
from specter.text.tokenizer import load_tokenizer

VOCAB = 2048
NAME = "a-model"
TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>", {})
ROUND = 3  # tokens committed, of as many drafted ones
NOTHING: dict[str, Any] = {one.name: 0 for one in fields(RoundRecord) if one.default is MISSING}
NO_ROUND = RoundRecord(**NOTHING)


@dataclass
class Scripted:
    """A generator whose tokens depend on prompt and seed, and whose rounds a test may hold up.

    Attributes:
        steps: released once per round; None: rounds do not wait. error: raised by the next round.
        committed: tokens by generation.
    """

    capacity: int = 256
    steps: threading.Semaphore | None = None
    error: Exception | None = None
    committed: list[list[int]] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def tokens(self, prompt: list[int], num: int, sampling: SamplingConfig) -> list[int]:
        begin = sum(prompt) + (sampling.seed if sampling.kind == "seeded" else 0)
        return [300 + (begin * 7 + 13 * i) % 500 for i in range(num)]

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: SamplingConfig,
        stop_ids: frozenset[int] = frozenset(),
        on_commit: OnCommit = lambda tokens: None,
    ) -> Generation:
        generation = Generation("virtual", len(prompt))
        self.committed.append(generation.tokens)
        self.started.release()
        tokens = self.tokens(prompt, max_new_tokens, sampling)
        reason: StopReason = "length"
        for begin in range(1 - ROUND, len(tokens), ROUND):  # prefill's token, then rounds of a few
            if self.steps is not None:
                assert self.steps.acquire(timeout=20)
            if self.error is not None:
                raise self.error
            new = tokens[max(begin, 0) : begin + ROUND]
            generation.tokens.extend(new)
            if begin > 0:
                generation.rounds.append(replace(NO_ROUND, draft_len=ROUND, accepted_len=len(new) - 1))
            if on_commit(new):
                reason = "stop"
                break
        generation.stop_reason = reason
        return generation


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    service: Service

    def client(self, **options: Any) -> openai.OpenAI:
        chosen: dict[str, Any] = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **chosen)


Serve = Callable[..., AbstractContextManager[Server]]


@contextmanager
def serving(
    opened: AbstractContextManager[Generates],
    *,
    key: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    tokenizer: Path = Path("data/standins/tokenizer.json"),
    **options: Any,
) -> Iterator[Server]:
    """A server whose engine lives in a thread, as `opened` demands."""
    bound = bind("127.0.0.1", 0)
    ready: list[Service] = []
    is_ready = threading.Event()

    def serve() -> None:
        try:
            with opened as generator:
                metrics = Metrics()
                worker = Worker(generator, limits.max_waiting, metrics)
                facts: dict[str, Any] = {
                    "template": TEMPLATE,
                    "eos": frozenset(),
                    "vocab": VOCAB,
                    "longest": generator.capacity - 1,
                }
                service = Service(NAME, worker, metrics, load_tokenizer(tokenizer), **(facts | options))
                ready.append(service)
                app = build_app(service, key, limits.max_body_bytes)
                is_ready.set()
                run(app, worker, bound, limits)
        finally:
            is_ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    is_ready.wait()
    [service] = ready
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:  # it may not listen yet
            client.get(f"{url}/health")
        yield Server(url, service)
    finally:
        service.worker.close(cancels=True)
        thread.join()


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def server(scripted: Scripted) -> Iterator[Server]:
    with serving(nullcontext(scripted)) as running:
        yield running
