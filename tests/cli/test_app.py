"""The command line itself: arguments in, errors on one screen."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specter.cli import app as command
from specter.cli import generate
from specter.cli.choice import Choice, find_model, find_system
from specter.cli.generate import Settings
from specter.errors import SpecterError
from specter.models.checkpoint import write_checkpoint
from tests.helpers import TINY, random_tensors
from tests.runtime.test_prompts_on_the_command_line import TEXTS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `generate` is called with."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(generate, "generate", lambda *args, **named: calls.append((*args, named)))
    return calls


def run(*arguments: str, stdin: str | bytes | None = None) -> None:
    result = CliRunner().invoke(command.app, list(arguments), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_a_prompt(text: str, asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    run("generate", "model", "--", text)
    run("generate", "model", stdin=text)
    (tmp_path / "text").write_text(text)
    run("generate", "model", "--file", str(tmp_path / "text"))
    assert [call[1] for call in asked] == [text] * 3


def test_options_reach_the_generation(asked: list[tuple[Any, ...]]) -> None:
    run(
        "generate", "m", "text", "--temperature", "0.7", "--seed", "5", "--stop", "a", "--stop", "b", "--k", "auto",
        "--system", "lru", "--budget", "24GB", "--max-new-tokens", "9", "--ignore-eos", "--chat",
    )  # fmt: skip
    run("generate", "m", "text", "--k", "8")
    [(choice, _, settings, _, named), (other, _, plain, _, _)] = asked
    assert choice == Choice("m", "lru", "24GB", "auto") and other.k == 8
    assert isinstance(settings, Settings) and named == {"chat": True}
    assert (settings.sampling.kind, settings.sampling.temperature, settings.sampling.seed) == ("seeded", 0.7, 5)
    assert (settings.max_new_tokens, list(settings.stops), settings.ignore_eos) == (9, ["a", "b"], True)
    assert plain.sampling.kind == "greedy"


def test_a_text_and_a_file_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="both given"):
        generate.given_text("a", tmp_path)


def test_without_a_text_at_a_terminal_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert generate.given_text(None, None) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "no-such-model", "hi"], "no model of conf/model, no directory and no hub id"),
        (["generate", "deepseek_v2_lite", "hi", "--system", "fastest"], "system 'fastest' is unknown"),
        (["generate", "deepseek_v2_lite", "hi", "--k", "deep"], "k='deep' is not a depth"),
        (["generate", "deepseek_v2_lite", "hi", "--budget", "1GB"], "needs"),
        (["plan", "deepseek_v2_lite", "--hardware", "none"], "hardware 'none' is unknown"),
        (["generate", "deepseek_v2_lite", " "], "the text is empty"),
        (["generate", "deepseek_v2_lite", "hi", "--chat"], "chat template"),
    ],
)
def test_a_fault_ends_on_one_screen(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specter", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2 and message in done.stderr.replace("\n", " ") and "->" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 12 and not done.stdout


def test_a_wrong_option_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specter", "plan", "--budgets"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--budgets" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", ["plan deepseek_v2_lite", "doctor", "--help"])
def test_an_output_that_cannot_be_written_ends_on_one_line(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specter", *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False, timeout=120,
        )  # fmt: skip
    assert done.returncode == 2 and "standard output: No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", ["plan deepseek_v2_lite --budget 20GB", "doctor", "--help"])
def test_a_terminal_that_shows_ascii_alone_gets_every_screen(arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specter", *arguments.split()], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout.isascii() and "Traceback" not in done.stderr


def test_brackets_in_a_path_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "a[" / "b][red]"  # [/b] would end a style that was never begun
    write_checkpoint(directory, TINY, random_tensors(TINY, seed=0))
    find_system(None, find_model(str(directory), command.errors()), command.errors())
    assert str(directory) in capsys.readouterr().err.replace("\n", "")
    run("plan", str(directory))
