"""A whole generation on a shipped stand-in: streamed, stopped, and equal to an experiment's."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from specter.cli.choice import Choice, configure
from specter.cli.generate import Session, Settings
from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.generation import GREEDY, MAX_SEED, Generator, Usage, opened
from specter.models.hub_config import read_spec
from specter.resolve import resolve
from specter.text.tokenizer import load_tokenizer

STANDIN, PROMPT, NUM_TOKENS = Path("data/standins/deepseek_v2_lite"), "The ferry left the harbour", 12
TOKENIZER = load_tokenizer(STANDIN.parent / "tokenizer.json", read_spec(STANDIN).vocab)
SEEDED = SamplingConfig("seeded", temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    console = Console(file=io.StringIO())
    config = configure(Choice(str(STANDIN), "lru"), console, 64, GREEDY)
    with opened(resolve(config), console, 32) as generator:
        yield generator


def test_generations_follow_one_another_from_a_warm_cache(generator: Generator) -> None:
    prompt = TOKENIZER.encode(PROMPT)
    first, seeded, again = (generator.generate(prompt, NUM_TOKENS, one) for one in (GREEDY, SEEDED, GREEDY))
    assert first.tokens == again.tokens != seeded.tokens
    assert first.stop_reason == "length" and len(first.tokens) == NUM_TOKENS
    assert generator.generate(prompt, NUM_TOKENS, SEEDED).tokens == seeded.tokens
    cold, warm = Usage.of(first), Usage.of(again)
    assert warm.ttft_ms < cold.ttft_ms and cold.hit_rate is not None
    assert cold.acceptance is None and cold.tpot_ms and cold.num_rounds == NUM_TOKENS - 1


def test_a_caller_may_end_it_and_a_stop_token_does(generator: Generator) -> None:
    prompt = TOKENIZER.encode(PROMPT)
    whole = generator.generate(prompt, NUM_TOKENS).tokens
    ended = generator.generate(prompt, NUM_TOKENS, on_commit=lambda tokens: True)
    assert (ended.tokens, ended.stop_reason) == (whole[:1], "stop")
    token = whole[4]
    stopped = generator.generate(prompt, NUM_TOKENS, stop_ids=[token])
    assert (stopped.tokens, stopped.stop_reason) == (whole[: whole.index(token) + 1], "eos")


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused(generator: Generator, seed: int) -> None:
    with pytest.raises(SpecterError, match="out of range"):
        generator.generate([1], 1, SamplingConfig("seeded", seed=seed))


def test_a_text_is_streamed_and_cut_before_a_stop_string(
    generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**settings: object) -> str:
        chosen = Settings(NUM_TOKENS, **settings)  # type: ignore[arg-type]
        session = Session(generator, TOKENIZER, chosen, frozenset(), Console(file=io.StringIO()))
        text = session.answer(TOKENIZER.encode(PROMPT))
        assert capsys.readouterr().out.removesuffix("\n") == text.removesuffix("\n")
        return text

    text = run()
    word = text.split()[2]
    assert text and run(stops=[word]) == text[: text.index(word)]


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "phi3_5_moe", "qwen1_5_moe"])
def test_a_stand_in_streams_within_three_seconds_after_loading(model: str) -> None:
    """Of this thread's own time: other work of the machine does not count."""
    directory, console = STANDIN.parent / model, Console(file=io.StringIO())
    tokenizer = load_tokenizer(STANDIN.parent / "tokenizer.json", read_spec(directory).vocab)
    times: list[float] = []
    with opened(resolve(configure(Choice(str(directory), "lru"), console, 64, GREEDY)), console, 32) as generator:
        start = time.thread_time()
        generator.generate(tokenizer.encode(PROMPT), 4, on_commit=lambda tokens: times.append(time.thread_time()))
    assert len(times) == 4 and times[0] - start < 3


def test_the_command_generates_from_a_wheel_outside_the_repository(tmp_path: Path) -> None:
    """The wheel has all that a user without the repository needs."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, "."],
        check=True, timeout=300,
    )  # fmt: skip
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        entries = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "specter = specter.cli.app:main" in archive.read(entries).decode()

    def specter(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "specter", *arguments], cwd=tmp_path / "site", env={"SPECTER_HOME": str(tmp_path)},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip

    directory = str(STANDIN.absolute())
    assert "Systems within this budget" in specter("plan", "deepseek_v2_lite").stdout
    assert "This machine" in specter("doctor").stdout
    done = specter("generate", directory, PROMPT, "--max-new-tokens", "4")
    assert done.stdout.strip() and "no INT4 draft" in done.stderr
    assert re.search(r"4 tokens in .* ended by length", done.stderr.replace("\n", " "))
