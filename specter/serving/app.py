"""The HTTP interface: OpenAI's endpoints over one `Worker`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.serving.gate import Gate
from specter.serving.metrics import Metrics
from specter.serving.protocol import Body, ChatBody, ChatReply, CompletionBody, Refusal, Reply, dumps, json_response
from specter.serving.worker import Busy, Closed, Done, Event, Job, Worker
from specter.text.chat import ChatTemplate
from specter.text.stream import TextStream
from specter.text.tokenizer import Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Service:
    """What requests are answered with.

    Args:
        name: of the model, as requests give it. template: None if the checkpoint has none.
        sampling: of a request that states none. vocab: tokens of the model. longest: tokens of the longest prompt.
    """

    name: str
    worker: Worker
    metrics: Metrics
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos: frozenset[int]
    vocab: int
    longest: int
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig("greedy"))

    def encode_completion(self, body: CompletionBody) -> list[int]:
        prompt = body.one_prompt(self.vocab)
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def encode_chat(self, body: ChatBody) -> list[int]:
        messages = [message.plain(index) for index, message in enumerate(body.messages)]
        if self.template is None:
            raise Refusal(400, f"{self.name} has no chat template; use /v1/completions", "messages")
        return self.tokenizer.encode_bare(self.template.render(messages))

    def check(self, body: Body) -> None:
        """Raises Refusal: another model, or a parameter that is not honoured."""
        body.check()
        if body.model != self.name:
            raise Refusal(404, f"the model {body.model!r} is not served; {self.name!r} is", "model", "model_not_found")

    def num_new(self, prompt: list[int], asked: int | None) -> int:
        """Tokens to generate, by default as many as fit. Raises Refusal: the prompt is empty, or they do not fit."""
        capacity = self.worker.generator.capacity
        room = capacity - len(prompt)
        if not prompt:
            raise Refusal(400, "the prompt has no tokens", "prompt")
        if len(prompt) > self.longest or room < (asked or 1):
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} tokens and {asked or 1} new ones are asked for; this server holds "
                f"{capacity} in all, {self.longest} of them in the prompt",
                code="context_length_exceeded",
            )
        return asked or room

    def submit(self, body: Body, prompt: list[int], max_new_tokens: int) -> tuple[Job, asyncio.Queue[Event]]:
        """A job in the line, and where its events arrive. Raises Refusal: the line is full, or the server ends."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        eos = frozenset() if body.ignore_eos else self.eos
        job = Job(
            prompt,
            max_new_tokens,
            body.sampling(self.sampling),
            stop_ids=eos,
            stream=TextStream(self.tokenizer, prompt, body.stops, eos),
            emit=lambda event: _deliver(loop, events, event),
        )
        try:
            self.worker.submit(job)
        except Busy:
            self.metrics.ended("busy")
            raise Refusal(
                429, f"{self.worker.max_waiting} requests are waiting; try again later", code="queue_full"
            ) from None
        except Closed:
            raise refused(Closed()) from None
        return job, events


def _deliver(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    with suppress(RuntimeError):  # the loop has ended with the server
        loop.call_soon_threadsafe(events.put_nowait, event)


def refused(error: Exception) -> Refusal:
    """The answer to a job that ended with an error."""
    if isinstance(error, SpecterError):
        return Refusal(400, f"{error.what}: {error.remedy}")
    if isinstance(error, Closed):
        return Refusal(503, "the server ends", code="shutting_down")
    return Refusal(500, "the generation failed; the server's log says why", code="generation_failed")


class EventStream(StreamingResponse):
    """Server-sent events; ends its job when the client leaves, whatever it waits for then."""

    def __init__(self, service: Service, job: Job, chunks: AsyncIterator[str]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service, self._job = service, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.worker.cancel(self._job)


async def answer(service: Service, request: Request, body: Body, reply: Reply, prompt: list[int],
                 asked: int | None) -> Response:  # fmt: skip
    """Runs one request, and answers it whole or in events."""
    job, events = service.submit(body, prompt, service.num_new(prompt, asked))
    try:
        # A request that fails before its first token gets a status of its own, streamed or not.
        first = await _unless_left(request, events.get())
        if isinstance(first, Exception):
            raise refused(first)
        if body.stream:
            chunks = _chunks(reply, first, events, includes_usage=body.includes_usage)
            return EventStream(service, job, chunks)
        text, done = await _unless_left(request, _whole(first, events))
        return json_response(reply.whole(text, done))
    except BaseException:
        service.worker.cancel(job)
        raise


async def _whole(first: str | Done, events: asyncio.Queue[Event]) -> tuple[str, Done]:
    pieces, event = [], first
    while isinstance(event, str):
        pieces.append(event)
        if isinstance(received := await events.get(), Exception):
            raise refused(received)
        event = received
    return "".join(pieces), event


async def _chunks(
    reply: Reply, first: str | Done, events: asyncio.Queue[Event], *, includes_usage: bool
) -> AsyncIterator[str]:
    for body in reply.opening():
        yield _event(body)
    event: Event = first
    while isinstance(event, str):
        yield _event(reply.chunk(event))
        event = await events.get()
    if isinstance(event, Done):
        yield _event(reply.last(event))
        if includes_usage:
            yield _event(reply.usage(event))
    else:
        yield _event(refused(event).body)
    yield "data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {dumps(body)}\n\n"


async def _unless_left(request: Request, result: Awaitable[Result]) -> Result:
    """The result. Raises ClientDisconnect if the client leaves before."""
    waits = asyncio.ensure_future(result), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not waits[0].done():
            raise ClientDisconnect
        return waits[0].result()
    finally:
        for one in waits:
            one.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build_app(service: Service, key: str | None, max_body_bytes: int) -> FastAPI:
    """The application. key: that requests must give, if any."""
    app = FastAPI(title="Specter", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, key=key, max_body_bytes=max_body_bytes)
    card = {"id": service.name, "object": "model", "created": 0, "owned_by": "specter",
            "max_model_len": service.worker.generator.capacity}  # fmt: skip

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.check(body)
        prompt = await asyncio.to_thread(service.encode_completion, body)
        return await answer(service, request, body, Reply(service.name), prompt, body.max_tokens)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check(body)
        prompt = await asyncio.to_thread(service.encode_chat, body)
        asked = body.max_completion_tokens or body.max_tokens
        return await answer(service, request, body, ChatReply(service.name), prompt, asked)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.name:
            raise Refusal(404, f"the model {name!r} is not served", "model", "model_not_found")
        return json_response(card)

    @app.get("/health")
    async def health() -> Response:
        """503 while the last generation failed: a broken device fails every one."""
        failure = service.worker.failure
        return json_response({"status": "failing" if failure else "ok"}, 503 if failure else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(SpecterError)
    async def on_specter_error(_: Request, error: SpecterError) -> Response:
        return refused(error).response

    @app.exception_handler(ClientDisconnect)
    async def on_leaving(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()[0]).response

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        refusal = error if isinstance(error, Refusal) else Refusal(error.status_code, str(error.detail))
        return refusal.response

    @app.exception_handler(Exception)
    async def on_fault(_: Request, error: Exception) -> Response:
        return refused(error).response

    return app


def invalid(found: Mapping[str, Any]) -> Refusal:
    """The refusal of a body that is not as its schema."""
    place = [str(part) for part in found["loc"][1:]]
    param = ".".join(place) or None
    return Refusal(400, f"{param or 'body'}: {found['msg']}", param)
