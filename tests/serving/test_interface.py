"""The HTTP interface over a scripted generator: answers, refusals by name, error bodies, limits, the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest

from specter.config import SamplingConfig
from specter.serving.server import Limits
from tests.serving.conftest import NAME, VOCAB, Scripted, Server, serving

GREEDY = SamplingConfig("greedy")
PROMPT = [5, 6, 7]
HELLO: Any = [{"role": "user", "content": "Hello!"}]


def complete(server: Server, **parameters: Any) -> Any:
    """The choice and the usage of a completion."""
    answer: Any = server.client().completions.create(**({"model": NAME, "prompt": PROMPT} | parameters))
    return answer.choices[0], answer.usage


def post(server: Server, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=20, **options)


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


def expected(server: Server, scripted: Scripted, num: int, sampling: SamplingConfig = GREEDY) -> str:
    return server.service.tokenizer.decode(scripted.tokens(PROMPT, num, sampling))


def test_a_completion(server: Server, scripted: Scripted) -> None:
    choice, usage = complete(server, max_tokens=8)
    assert choice.text == expected(server, scripted, 8)
    assert choice.finish_reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 8, 11)
    assert (
        usage.acceptance == 4 / 7
    )  # after prefill, rounds of 3, 3 and 1 tokens: 2, 2 and 0 accepted, and each rejects one


def test_a_text_prompt_and_one_in_a_list_are_one(server: Server) -> None:
    texts = [complete(server, prompt=prompt, max_tokens=5)[0].text for prompt in ("Hi there", ["Hi there"])]
    ids = server.service.tokenizer.encode("Hi there")
    texts += [complete(server, prompt=prompt, max_tokens=5)[0].text for prompt in (ids, [ids])]
    assert len(set(texts)) == 1


def test_a_seed_repeats_and_none_does_not(server: Server, scripted: Scripted) -> None:
    seeded = SamplingConfig("seeded", temperature=0.7, seed=11)
    texts = [complete(server, max_tokens=8, temperature=0.7, seed=11)[0].text for _ in range(2)]
    assert texts == [expected(server, scripted, 8, seeded)] * 2
    assert len({complete(server, max_tokens=8, temperature=0.7)[0].text for _ in range(4)}) > 1


def test_a_stop_string_ends_the_text_and_the_generation(server: Server, scripted: Scripted) -> None:
    tokens = scripted.tokens(PROMPT, 40, GREEDY)
    stop = server.service.tokenizer.decode(tokens)[12:16]
    choice, usage = complete(server, max_tokens=40, stop=stop)
    whole = expected(server, scripted, 40)
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert usage.completion_tokens <= len(scripted.committed[-1]) < 40


def test_events_join_to_the_whole_answer(server: Server) -> None:
    whole, used = complete(server, max_tokens=20)
    stream = server.client().completions.create(
        model=NAME, prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 3
    assert last.choices == [] and last.usage == used
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_a_chat_and_its_events(server: Server) -> None:
    client = server.client()
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=20)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    prompt = server.service.tokenizer.encode_bare("<user>Hello!\n<assistant>")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]}]
    stream = client.chat.completions.create(model=NAME, messages=parts, max_tokens=20, stream=True)
    chunks: list[Any] = [chunk.choices[0] for chunk in stream]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].finish_reason == choice.finish_reason == "length"


def test_without_max_tokens_the_text_fills_the_capacity(server: Server, scripted: Scripted) -> None:
    assert complete(server)[1].total_tokens == scripted.capacity


NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": None, "top_logprobs": 0, "frequency_penalty": 0,
    "presence_penalty": 0.0, "logit_bias": {}, "suffix": None, "user": "me", "metadata": {"a": "b"}, "tools": [],
    "tool_choice": "auto", "response_format": {"type": "text"}, "service_tier": "auto", "store": True,
    "top_p": 1, "top_k": 0, "temperature": 0, "stop": None, "seed": None, "stream": None, "unheard_of": None,
}  # fmt: skip


def test_parameters_that_ask_for_nothing_are_accepted(server: Server) -> None:
    plain = complete(server, max_tokens=8)[0].text
    response = post(server, json={"model": NAME, "prompt": PROMPT, "max_tokens": 8} | NEUTRAL)
    assert response.json()["choices"][0]["text"] == plain


UNSUPPORTED = [
    ("n", 2), ("best_of", 3), ("echo", True), ("logprobs", 0), ("logprobs", 5), ("logprobs", True),
    ("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"5": 1}), ("suffix", "end"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}), ("functions", [{"name": "f"}]), ("min_p", 0.1), ("guided_regex", "a"),
    ("reasoning_effort", "low"), ("modalities", ["audio"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_parameters_that_are_not_honoured_are_refused_by_name(shared: Server, name: str, value: Any) -> None:
    error = refusal(post(shared, json={"model": NAME, "prompt": PROMPT, name: value}), 400)
    assert error["param"] == name and name in error["message"] and error["code"] == "unsupported_parameter"


WRONG = [
    ("temperature", 3), ("temperature", -1), ("temperature", 0.001), ("temperature", "hot"), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -1), ("seed", -1), ("seed", 2**63), ("seed", 1.5), ("max_tokens", 0), ("max_tokens", 2.5),
    ("max_tokens", True), ("stop", ["a"] * 5), ("stop", ""), ("stream", "yes"), ("prompt", ["a", "b"]),
    ("prompt", [[1], [2]]), ("prompt", [VOCAB]), ("prompt", [-1]), ("prompt", []), ("prompt", 5),
    ("model", "another\ud800"), ("model", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(shared: Server, name: str, value: Any) -> None:
    body = json.dumps({"model": NAME, "prompt": PROMPT} | {name: value})
    response = post(shared, content=body, headers={"Content-Type": "application/json"})
    error = refusal(response, 404 if isinstance(value, str) and name == "model" else 400)
    assert name in (error["param"] or error["message"])
    assert "Traceback" not in error["message"]


def test_a_text_that_is_not_unicode_is_refused(shared: Server) -> None:
    body = json.dumps({"model": NAME, "prompt": "half a pair: \ud800"})
    response = post(shared, content=body, headers={"Content-Type": "application/json"})
    assert "surrogate" in refusal(response, 400)["message"]


MESSAGES = [
    ([], "messages"),
    ([{"content": "Hi"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], "messages.0"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}], "messages.0.tool_calls"),
    ([{"role": "user", "content": "Hi", "name": "Bob"}], "messages.0.name"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
def test_messages_that_are_more_than_text_are_refused(shared: Server, messages: list[Any], param: str) -> None:
    error = refusal(post(shared, "/v1/chat/completions", json={"model": NAME, "messages": messages}), 400)
    assert error["param"].startswith(param)


def test_a_checkpoint_without_a_template_refuses_chats(scripted: Scripted) -> None:
    with serving(nullcontext(scripted), template=None) as server:
        response = post(server, "/v1/chat/completions", json={"model": NAME, "messages": HELLO})
        assert "/v1/completions" in refusal(response, 400)["message"]


BODIES = [
    ("not JSON", b"{"),
    ("no object", b"[]"),
    ("a number", b"1e999"),
    ("nothing", b""),
    ("not UTF-8", b'{"model": "\xff"}'),
    ("not a number", b'{"model": "a-model", "prompt": [5], "temperature": NaN}'),
    ("deep", b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("a huge integer", b'{"model": "a-model", "prompt": [' + b"9" * 5_000 + b"]}"),
]


@pytest.mark.parametrize("body", [body for _, body in BODIES], ids=[name for name, _ in BODIES])
def test_bodies_that_are_no_request_are_refused(shared: Server, body: bytes) -> None:
    refusal(post(shared, content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_that_is_not_declared_as_json_is_refused(shared: Server) -> None:
    """A browser sends it for a page of another site without asking the server first."""
    body = json.dumps({"model": NAME, "prompt": PROMPT}).encode()
    refusal(post(shared, content=body, headers={"Content-Type": "text/plain"}), 400)


def test_long_bodies_are_refused(shared: Server) -> None:
    body = b'{"model": "' + b"a" * 2**18 + b'"}'

    def pieces() -> Iterator[bytes]:
        yield from (body[begin : begin + 1000] for begin in range(0, len(body), 1000))

    for content in (body, pieces()):  # the second is sent without its length
        response = post(shared, content=content, headers={"Content-Type": "application/json"})
        assert refusal(response, 413)["code"] == "body_too_long"


def test_prompts_that_do_not_fit_are_refused(shared: Server) -> None:
    for prompt, max_tokens in (([5] * 256, 1), ([5] * 200, 57), ([5] * 300, None)):
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens}
        assert refusal(post(shared, json=body), 400)["code"] == "context_length_exceeded"


def test_other_models_and_places_are_not_found(shared: Server) -> None:
    assert refusal(post(shared, json={"model": "../../etc/passwd", "prompt": PROMPT}), 404)["code"] == "model_not_found"
    for path in ("/v1/models/other", "/v1/models/../../etc/passwd", "/v1/files", "/docs", "/openapi.json", "/"):
        refusal(httpx.get(shared.url + path), 404)
    refusal(httpx.get(f"{shared.url}/v1/completions"), 405)


def test_models_health_and_metrics(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    complete(server, max_tokens=8)
    text = httpx.get(f"{server.url}/metrics").text
    for line in ('specter_requests_total{outcome="answered"} 1.0', "specter_completion_tokens_total 8.0",
                 "specter_prompt_tokens_total 3.0", "specter_requests_waiting 0.0"):  # fmt: skip
        assert line in text.splitlines()


def test_a_key_guards_all_but_health_and_metrics(scripted: Scripted) -> None:
    with serving(nullcontext(scripted), key="a secret") as server:
        assert server.client(api_key="a secret").completions.create(model=NAME, prompt=PROMPT, max_tokens=2).choices
        for wrong in ("a secre", "a secret2", "none"):
            with pytest.raises(openai.AuthenticationError):
                server.client(api_key=wrong).models.list()
        assert refusal(httpx.get(f"{server.url}/v1/models"), 401)["code"] == "invalid_api_key"
        odd = {b"Authorization": "Bearer ключ".encode()}
        refusal(httpx.get(f"{server.url}/anything", headers=odd), 401)
        assert httpx.get(f"{server.url}/health").is_success and httpx.get(f"{server.url}/metrics").is_success


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """One server for requests that do not reach the generator."""
    with serving(nullcontext(Scripted()), limits=Limits(max_body_bytes=2**18 - 1)) as running:
        yield running
