"""The server's process: a socket, uvicorn in a thread, the engine in the calling one, and the end of both."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from specter.errors import SpecterError
from specter.serving.worker import Worker

_SIGNALS = signal.SIGINT, signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes on.

    Attributes:
        max_waiting: requests in the line; one more gets a 429.
        grace_s: time that requests have to end when the server does.
    """

    max_waiting: int = 16
    max_body_bytes: int = 2**20
    grace_s: int = 30


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises SpecterError: the address is taken, or not of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        raise SpecterError(f"cannot bind {host}:{port}: {error}", "choose another --port or --host") from None
    return bound


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def run(app: FastAPI, worker: Worker, bound: socket.socket, limits: Limits) -> None:
    """Serves until SIGINT or SIGTERM: then requests have `grace_s` to end, those in the line included. A second SIGINT
    ends them with their round. Call it in the thread that has loaded the model."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=limits.grace_s
    )
    server = uvicorn.Server(config)
    errors: list[Exception] = []

    def listen() -> None:
        try:
            server.run(sockets=[bound])
        except Exception as error:
            errors.append(error)
        finally:
            worker.close(cancels=True)

    thread = threading.Thread(target=listen, name="http")
    with _signals(server):
        thread.start()
        try:
            worker.run()
        finally:
            server.should_exit = True
            thread.join()
    if errors:  # such as another server that has bound the same port since
        raise SpecterError(f"the server has ended: {errors[0]}", "choose another --port or --host") from errors[0]


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[None]:
    """Ends the server on SIGINT and SIGTERM; uvicorn sets handlers in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, server.handle_exit) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
