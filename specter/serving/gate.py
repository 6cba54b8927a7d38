"""What a request must have before any of it is used: the key, and a body that is not too long."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specter.serving.protocol import Refusal

_OPEN = ("/health", "/metrics")  # without a key: they have no text


class Gate:
    """Refuses a request without the key before its body is read, and one whose body is too long as soon as it is."""

    def __init__(self, app: ASGIApp, key: str | None, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given, length = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
        if self._expected and scope["path"] not in _OPEN and not hmac.compare_digest(given, self._expected):
            refusal = Refusal(401, "give the server's key as a bearer token", code="invalid_api_key")
            return await refusal.response(scope, receive, send)
        if int(length) > self._max_body_bytes:
            return await self._too_long().response(scope, receive, send)
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:  # a body that is sent in chunks states no length
                raise self._too_long()
            return message

        return await self._app(scope, limited, send)

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self._max_body_bytes} bytes", code="body_too_long")
