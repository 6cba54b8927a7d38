"""OpenAI's requests and answers. A parameter that is not honoured is refused by name, unless it asks for nothing."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastapi import HTTPException, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from specter.config import SamplingConfig
from specter.generation import MAX_SEED
from specter.serving.worker import Done

MAX_STOPS = 4
MIN_TEMPERATURE = 0.01  # below it logits / temperature overflow; 0 is greedy
# Values that ask for nothing beyond what is done. null does so for every parameter.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# They change no text.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "prediction", "parallel_tool_calls")
)  # fmt: skip
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
          503: "server_error"}  # fmt: skip
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


class Refusal(HTTPException):
    """A request that gets an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        kind = _TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status_code, self.headers)


def dumps(body: Mapping[str, Any]) -> str:
    """JSON in ASCII, which any text of a request survives."""
    return json.dumps(body, separators=(",", ":"))


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), status, dict(headers or {}), "application/json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[_Part]

    def plain(self, index: int) -> dict[str, str]:
        """For a chat template. Raises Refusal: it has more than a text."""
        _refuse_extra(self, f"messages.{index}.")
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # pads chunks against eavesdroppers; there are none on this machine


class Body(BaseModel):
    """Parameters of both endpoints. `top_k` and `ignore_eos` are not OpenAI's, but vLLM's."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: StrictInt | None = Field(None, ge=0)
    seed: StrictInt | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | list[str] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool | None = False

    @property
    def stops(self) -> list[str]:
        """Raises Refusal: too many, or an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise Refusal(400, f"give at most {MAX_STOPS} stop strings, none of them empty", "stop")
        return stops

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, default: SamplingConfig) -> SamplingConfig:
        """What the request asks for; `default` where it asks for nothing. A sampled text without a seed is a new one
        every time. Raises Refusal."""
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if default.kind == "greedy" else default.temperature
        if temperature == 0:
            return SamplingConfig("greedy")
        if temperature < MIN_TEMPERATURE:
            raise Refusal(400, f"use a temperature of 0 or from {MIN_TEMPERATURE} to 2", "temperature")
        return SamplingConfig(
            "seeded",
            temperature=temperature,
            top_k=default.top_k if self.top_k is None else self.top_k,
            top_p=default.top_p if self.top_p is None else self.top_p,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
        )

    def check(self) -> None:
        """Raises Refusal: a parameter that is not honoured."""
        _refuse_extra(self)


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]

    def one_prompt(self, vocab: int) -> str | list[int]:
        """The text, or the token ids. Raises Refusal: several prompts, or ids beyond the vocabulary."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Refusal(400, f"{len(prompt)} prompts in one request; send one each", "prompt")
            [prompt] = prompt
        if isinstance(prompt, list) and not all(0 <= token < vocab for token in prompt):
            raise Refusal(400, f"a token id is outside 0..{vocab - 1}", "prompt")
        found: str | list[int] = prompt
        return found


class ChatBody(Body):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)


def _refuse_extra(model: BaseModel, prefix: str = "") -> None:
    for name, value in (model.model_extra or {}).items():
        is_neutral = any(type(value) is type(one) and value == one for one in _NEUTRAL.get(name, ()))
        if value is None or is_neutral or (not prefix and name in _IGNORED):
            continue
        raise Refusal(400, f"{prefix}{name} is not supported", f"{prefix}{name}", "unsupported_parameter")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request, whole or in chunks."""

    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str] = "cmpl-"
    whole_kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        return self._body(self.whole_kind, [self._choice(self._text(text), done.finish_reason)], usage(done))

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return []

    def chunk(self, text: str) -> dict[str, Any]:
        return self._body(self.chunk_kind, [self._choice(self._piece(text), None)])

    def last(self, done: Done) -> dict[str, Any]:
        return self._body(self.chunk_kind, [self._choice(self._piece(""), done.finish_reason)])

    def usage(self, done: Done) -> dict[str, Any]:
        return self._body(self.chunk_kind, [], usage(done))

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _choice(self, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _body(self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> dict[str, Any]:
        body = {"id": self.prefix + self.id, "object": kind, "created": self.created, "model": self.model}
        return body | {"choices": choices} | ({"usage": used} if used else {})


@dataclass(frozen=True, slots=True)
class ChatReply(Reply):
    """The answer of an assistant."""

    prefix: ClassVar[str] = "chatcmpl-"
    whole_kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [self._body(self.chunk_kind, [self._choice({"delta": {"role": "assistant", "content": ""}}, None)])]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def usage(done: Done) -> dict[str, Any]:
    """OpenAI's usage; `acceptance` is ours: accepted drafts / examined drafts, null without a draft."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        "acceptance": done.acceptance,
    }
