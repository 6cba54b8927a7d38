"""A stand-in behind the server, and what its answers must be. For tests only."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.plan import compose
from specter.config import BudgetConfig, SamplingConfig
from specter.generation import Generator
from specter.models.cpu.live import LiveModel
from specter.prompts import shipped_texts
from specter.resolve import resolve
from specter.text.stream import TextStream
from specter.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import open_live
from tests.serving.conftest import NAME, TEMPLATE

CAPACITY = 256
CONFIG = replace(compose(["warmup_tokens=0"]), kv_capacity=CAPACITY, k=7, budget=BudgetConfig("low"))
TEXT = " ".join(shipped_texts(Path("data/prompts/gsm8k.jsonl"))[:8])
END = "."  # the stand-ins have no end of a text; one of its tokens ends some early


def open_standin() -> LiveModel:
    """The stand-in with a round-to-nearest draft, which needs no calibration."""
    opened = open_live(Path(CONFIG.model.checkpoint), num_slots=CONFIG.tile_rows, capacity=CAPACITY)
    return LiveModel(opened.decoder, opened.store, notes={})


def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(CONFIG.model.tokenizer))


EOS = frozenset(tokenizer().encode_bare(END))


@contextmanager
def generating(live: LiveModel) -> Iterator[Generator]:
    """The generator that a server is given; enters in the thread of the engine."""
    run = resolve(CONFIG)
    with live.serving(run, CAPACITY - 1) as engine:
        yield Generator(live, run, engine)


@dataclass(frozen=True)
class Asked:
    """One request."""

    chat: tuple[tuple[str, str], ...]  # roles and contents; empty: a completion of `prompt`
    prompt: str
    max_tokens: int
    seed: int | None  # None: greedy
    stops: tuple[str, ...]
    stream: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.chat]

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        subject: dict[str, Any] = {"messages": self.messages} if self.chat else {"prompt": self.prompt}
        return {"model": NAME, "max_tokens": self.max_tokens, "stop": list(self.stops) or None} | sampling | subject

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        if self.chat:
            return tokenizer.encode_bare(TEMPLATE.render(self.messages))
        return tokenizer.encode(self.prompt)


@dataclass(frozen=True)
class Expected:
    """An answer, as `Generator.generate` and `TextStream` give it to a fresh engine for each text."""

    text: str
    finish_reason: str
    num_tokens: int


def expect(live: LiveModel, asked: Sequence[Asked]) -> list[Expected]:
    """What plain `generate` answers, without the KV of an earlier text."""
    coder, found = tokenizer(), []
    with live.serving(resolve(CONFIG), CAPACITY - 1) as engine:
        for one in asked:
            sampling = SamplingConfig("greedy")
            if one.seed is not None:
                sampling = SamplingConfig("seeded", temperature=0.8, seed=one.seed)
            live.set_sampling(engine, sampling)
            prompt = one.tokens(coder)
            tokens = engine.generate(prompt, one.max_tokens, stop_ids=EOS).tokens
            stream = TextStream(coder, prompt, one.stops, EOS)
            text = stream.add(tokens) + stream.finish()
            reason = "length" if stream.stop_reason is None else "stop"
            found.append(Expected(text, reason, stream.num_tokens))
    return found


def mixed(num: int) -> list[Asked]:
    """Requests of mixed length, kind and sampling; some continue the one before as a conversation does."""
    rng, found = random.Random(7), list[Asked]()
    for _ in range(num):
        begin = rng.randrange(len(TEXT) // 2)
        text = TEXT[begin : begin + rng.choice((3, 40, 120, 250))]
        chat: tuple[tuple[str, str], ...] = ()
        if rng.random() < 0.5:
            earlier = found[-1].chat if found and rng.random() < 0.7 and len(found[-1].chat) < 4 else ()
            text = text[:60]
            chat = (*earlier, (("user", "assistant")[len(earlier) % 2], text))
        found.append(
            Asked(
                chat,
                prompt=text,
                max_tokens=rng.choice((1, 2, 8, 20, 40)),
                seed=rng.choice((None, rng.randrange(2**40))),
                stops=rng.choice(((), (), ("e the", ". "))),
                stream=rng.random() < 0.5,
            )
        )
    return found
