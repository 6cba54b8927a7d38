"""A stand-in behind the server, asked by OpenAI's client: every answer is the one of `generate`."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import psutil
import pytest
import torch

from specter.models.cpu.live import LiveModel
from tests.serving.conftest import Server, serving
from tests.serving.standin import EOS, Asked, Expected, expect, generating, mixed, open_standin
from tests.serving.test_queue import gauge, outcomes, start, until

NUM_CLIENTS = 8


@pytest.fixture(scope="module")
def live() -> LiveModel:
    return open_standin()


@pytest.fixture(scope="module")
def server(live: LiveModel) -> Iterator[Server]:
    with serving(generating(live), eos=EOS) as running:
        yield running


def ask(client: openai.OpenAI, one: Asked, *, stream: bool) -> tuple[Expected, int]:
    """The answer, and the tokens of the prompt whose KV was kept."""
    interface: Any = client.chat.completions if one.chat else client.completions
    if not stream:
        answer = interface.create(**one.body)
        choice = answer.choices[0]
        text = choice.message.content if one.chat else choice.text
        reason, usage = choice.finish_reason, answer.usage
    else:
        *chunks, last = interface.create(**one.body, stream=True, stream_options={"include_usage": True})
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join((choice.delta.content or "") if one.chat else choice.text for choice in choices)
        reason, usage = choices[-1].finish_reason, last.usage
    return Expected(text, reason, usage.completion_tokens), usage.prompt_tokens_details.cached_tokens


def test_streamed_whole_and_generated_are_one(live: LiveModel, server: Server) -> None:
    asked = mixed(12)
    expected = expect(open_standin(), asked)
    client = server.client()
    for one, its in zip(asked, expected, strict=True):
        assert ask(client, one, stream=True)[0] == its
        assert ask(client, one, stream=False)[0] == its
    assert {one.finish_reason for one in expected} == {"stop", "length"}


def test_a_conversation_keeps_its_kv_bit_for_bit(live: LiveModel, server: Server) -> None:
    """The second turn computes the new message alone, on the same KV, and answers as without the first."""
    client, coder = server.client(), server.service.tokenizer
    first = Asked((("user", "Tell me of the dog and its bone."),), "", max_tokens=30, seed=5, stops=(), stream=False)
    answer = ask(client, first, stream=False)[0].text
    second = replace(first, chat=(*first.chat, ("assistant", answer), ("user", "And of the cat?")))
    answered, cached = ask(client, second, stream=False)
    prompt = second.tokens(coder)
    assert len(prompt) > cached > len(first.tokens(coder))  # a part of the answer, too
    kept = live.decoder.cache.entries[:, : len(prompt)].clone()
    fresh = open_standin()
    assert expect(fresh, [second]) == [answered]
    assert torch.equal(fresh.decoder.cache.entries[:, : len(prompt)], kept)


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.stress)])
def test_many_clients_some_of_which_leave(num: int, capsys: pytest.CaptureFixture[str]) -> None:
    distinct = mixed(max(num // 4, 10))
    expected = dict(zip(distinct, expect(open_standin(), distinct), strict=True))
    order = list(itertools.islice(itertools.cycle(distinct), num))
    cut = set(range(7, num, 20))  # one in twenty leaves
    begin = time.monotonic()
    with serving(generating(open_standin()), eos=EOS) as server:
        memory = [rss() for _ in run_all(server, order, cut, expected)]
        until(lambda: gauge(server, "requests_running") == 0 == gauge(server, "requests_waiting"))
        answered, cancelled = outcomes(server, "answered"), outcomes(server, "cancelled")
        assert answered >= num - len(cut) and answered + cancelled <= num
        assert outcomes(server, "failed") == outcomes(server, "busy") == 0
        cached, tokens = gauge(server, "cached_tokens_total"), gauge(server, "prompt_tokens_total")
        with capsys.disabled():
            print(
                f"\n{num} requests: {answered:.0f} answered, {cancelled:.0f} ended by leaving clients; {cached:.0f} of "
                f"{tokens:.0f} prompt tokens kept; {time.monotonic() - begin:.0f} s; MB by eighth: {memory}"
            )
    assert memory[-1] - memory[len(memory) // 2] <= 10


def rss() -> int:
    """Resident memory of this process, client and server, in MB."""
    return round(psutil.Process(os.getpid()).memory_info().rss / 1e6)


def run_all(server: Server, order: Sequence[Asked], cut: set[int], expected: dict[Asked, Expected]) -> Iterator[int]:
    """Asks everything from several clients at once; yields at every eighth of it."""
    size = len(order) // 8
    local = threading.local()

    def one(number: int) -> None:
        asked = order[number]
        if number in cut:
            leave(server, number)
            return
        if not hasattr(local, "client"):
            local.client = server.client(timeout=300)
        assert ask(local.client, asked, stream=asked.stream)[0] == expected[asked], number

    numbers = list(range(len(order)))
    random.Random(3).shuffle(numbers)
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for begin in range(0, len(numbers), size):
            for _ in clients.map(one, numbers[begin : begin + size]):
                pass
            yield begin


def leave(server: Server, number: int) -> None:
    """A client that leaves behind its first token, or at once."""
    client = start(server, stream=True)
    if number % 3:
        client.settimeout(60)
        client.recv(20)
    client.close()
