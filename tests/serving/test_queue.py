"""The line of requests: its bound, clients that leave, faults of a generation, the end of the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest

from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.serving.server import Limits
from tests.serving.conftest import NAME, ROUND, Scripted, Server, serving


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def held() -> Scripted:
    """Every round waits for a release of `steps`."""
    return Scripted(steps=threading.Semaphore(0))


def go_on(held: Scripted) -> None:
    assert held.steps is not None
    held.steps.release(1000)


def ask(server: Server, prompt: int = 5, max_tokens: int = 60) -> Any:
    return server.client(timeout=20).completions.create(model=NAME, prompt=[prompt], max_tokens=max_tokens)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def gauge(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"specter_{name} ")), 0.0)


def outcomes(server: Server, outcome: str) -> float:
    return gauge(server, f'requests_total{{outcome="{outcome}"}}')


def waiting(server: Server, num: int) -> Callable[[], bool]:
    return lambda: gauge(server, "requests_waiting") == num and gauge(server, "requests_running") == 1


def start(server: Server, *, stream: bool) -> socket.socket:
    """A client that has sent a request."""
    body = json.dumps({"model": NAME, "prompt": [5], "max_tokens": 200, "stream": stream})
    url = httpx.URL(server.url)
    client = socket.create_connection((url.host, url.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(f"{head}\r\n\r\n{body}".encode())
    return client


def test_requests_beyond_the_bound_are_refused_and_the_others_answered(
    held: Scripted, pool: ThreadPoolExecutor
) -> None:
    with serving(nullcontext(held), limits=Limits(max_waiting=3)) as server:
        asked: list[Future[Any]] = []
        for number in range(4):  # one runs, three wait
            asked.append(pool.submit(ask, server, number))
            until(waiting(server, number))
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as refused:
                ask(server)
            assert refused.value.code == "queue_full"
            assert refused.value.response.headers["Retry-After"] == "1"
        go_on(held)
        decode = server.service.tokenizer.decode
        for number, future in enumerate(asked):
            assert future.result().choices[0].text == decode(held.tokens([number], 60, SamplingConfig("greedy")))
        assert outcomes(server, "busy") == 2 and outcomes(server, "answered") == 4
        go_on(held)
        assert ask(server).choices  # the line is free again


def test_without_a_line_one_request_runs(held: Scripted, pool: ThreadPoolExecutor) -> None:
    with serving(nullcontext(held), limits=Limits(max_waiting=0)) as server:
        first = pool.submit(ask, server)
        until(waiting(server, 0))
        with pytest.raises(openai.RateLimitError):
            ask(server)
        go_on(held)
        assert first.result().choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_turn_within_a_round(held: Scripted, stream: bool) -> None:
    assert held.steps is not None
    with serving(nullcontext(held)) as server:
        client = start(server, stream=stream)
        assert held.started.acquire(timeout=20)
        for _ in range(3):
            held.steps.release()
        until(lambda: len(held.committed[0]) == 1 + 2 * ROUND)
        client.close()
        until(lambda: bool(server.service.worker._running and server.service.worker._running.is_cancelled))
        held.steps.release()  # the round that runs when the client leaves
        until(lambda: gauge(server, "requests_running") == 0)
        assert len(held.committed[0]) == 1 + 3 * ROUND
        assert outcomes(server, "cancelled") == 1
        go_on(held)
        assert ask(server).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_line_frees_its_place(held: Scripted, pool: ThreadPoolExecutor, stream: bool) -> None:
    with serving(nullcontext(held), limits=Limits(max_waiting=1)) as server:
        first = pool.submit(ask, server)
        until(waiting(server, 0))
        client = start(server, stream=stream)
        until(waiting(server, 1))
        client.close()
        until(waiting(server, 0))
        second = pool.submit(ask, server, 6)
        until(waiting(server, 1))
        go_on(held)
        assert first.result().choices and second.result().choices
        assert len(held.committed) == 2  # the one that left was never started


def test_a_failed_generation_is_answered_and_the_server_goes_on(scripted: Scripted, server: Server) -> None:
    scripted.error = RuntimeError("CUDA error: a path /secret/place")
    with pytest.raises(openai.InternalServerError) as failed:
        ask(server)
    assert "secret" not in failed.value.message
    assert httpx.get(f"{server.url}/health").status_code == 503
    scripted.error = SpecterError("the device does not sample with top_p", "leave it out")
    with pytest.raises(openai.BadRequestError, match="leave it out"):
        ask(server)
    scripted.error = None
    assert ask(server).choices
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [outcomes(server, one) for one in ("failed", "refused", "answered")] == [1, 1, 1]


def test_a_fault_behind_the_first_token_ends_the_stream_with_an_error(held: Scripted, pool: ThreadPoolExecutor) -> None:
    assert held.steps is not None
    with serving(nullcontext(held)) as server:
        held.steps.release(2)
        stream = server.client(timeout=20).completions.create(model=NAME, prompt=[5], max_tokens=60, stream=True)
        chunks = iter(stream)
        next(chunks)
        held.error = RuntimeError("lost")
        held.steps.release()
        with pytest.raises(openai.APIError, match="log"):
            list(chunks)


def test_the_end_of_the_server_lets_requests_end(held: Scripted, pool: ThreadPoolExecutor) -> None:
    with serving(nullcontext(held)) as server:
        asked = [pool.submit(ask, server, number) for number in range(3)]
        until(waiting(server, 2))
        server.service.worker.close()
        with pytest.raises(openai.InternalServerError) as refused:
            ask(server)
        assert refused.value.status_code == 503
        go_on(held)
        assert all(future.result().choices[0].finish_reason == "length" for future in asked)
