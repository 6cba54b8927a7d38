"""`specter serve` as a process: it says where it is, answers, and ends on a signal without losing what runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from typer.testing import CliRunner

from specter.cli.app import app
from specter.errors import SpecterError

COMMAND = [sys.executable, "-m", "specter", "serve", "data/standins/deepseek_v2_lite", "--context", "128"]


@contextmanager
def running(*options: str, key: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"SPECTER_API_KEY": key} if key else {})
    process = subprocess.Popen([*COMMAND, "--port", "0", *options], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        found = next(match for line in process.stderr if (match := re.search(r"http://[\d.]+:\d+", line)))
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
            client.get(f"{found[0]}/health")
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends_on_a_signal_with_what_runs(number: signal.Signals) -> None:
    with running(key="a secret") as (process, url), ThreadPoolExecutor() as pool:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a secret", max_retries=0)
        [model] = client.models.list()
        assert model.id == "deepseek_v2_lite"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        stream = client.completions.create(model=model.id, prompt="A dog", max_tokens=100, stream=True)
        chunks = iter(stream)
        next(chunks)
        waits = pool.submit(client.completions.create, model=model.id, prompt="A cat", max_tokens=50)
        process.send_signal(number)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert process.wait(timeout=30) == 0
        assert waits.exception() is None or isinstance(waits.exception(), openai.APIConnectionError)


def fails(arguments: Sequence[str]) -> str:
    """What a command says that ends with status 2."""
    found = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    return found.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = fails(["--port", str(taken.getsockname()[1])])
    assert "--port" in text and "load experts" not in text
    assert "--host" in fails(["--host", "no.such.host.invalid"])


def test_the_extra_is_imported_by_serve_alone_and_named_where_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, specter.cli.app, specter.cli.generate; sys.exit('fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
    for name in [name for name in sys.modules if name.startswith("specter.serving.") or name == "specter.cli.serve"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    found = CliRunner().invoke(app, ["serve", "data/standins/deepseek_v2_lite"])
    assert isinstance(found.exception, SpecterError)
    assert "uvicorn" in found.exception.what and "specter-artifact[serve]" in found.exception.remedy
