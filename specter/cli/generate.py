"""`specter generate`: a text, or a conversation, streamed as its tokens are committed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from specter.cli.choice import Choice, configure, find_model
from specter.cli.output import Output
from specter.cli.plan import residency_table
from specter.config import SamplingConfig
from specter.engine import check_length
from specter.errors import SpecterError
from specter.generation import Generator, Usage, opened
from specter.models.hub_config import read_spec
from specter.prompts import read_text
from specter.records import Generation
from specter.resolve import check_paths, resolve
from specter.text.chat import ChatTemplate
from specter.text.stream import TextStream
from specter.text.tokenizer import Tokenizer, eos_ids, load_tokenizer

MAX_CONTEXT = 4096  # of a conversation, if the model has as many positions


@dataclass(frozen=True, slots=True)
class Settings:
    """How a text is continued."""

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig("greedy"))
    stops: Sequence[str] = ()
    ignore_eos: bool = False
    system_prompt: str | None = None


def given_text(text: str | None, file: Path | None) -> str | None:
    """The text given, of a file, or of standard input unless that is a terminal.
    Raises SpecterError: two of them, or as `read_text`."""
    if text is not None and file is not None:
        raise SpecterError("a text and --file are both given", "give one of the two")
    if text is None and file is None and sys.stdin.isatty():
        return None
    found = read_text(file) if text is None else text
    if not found.strip():
        raise SpecterError("the text is empty", "give a text to continue")
    return found


@dataclass(slots=True)
class Session:
    """One loaded model, its tokenizer, and where text and figures go."""

    generator: Generator
    tokenizer: Tokenizer
    settings: Settings
    eos: frozenset[int]
    console: Console

    def answer(self, prompt: Sequence[int]) -> str:
        """Streams the continuation to standard output; returns it."""
        settings = self.settings
        check_length(len(prompt), settings.max_new_tokens, self.generator.capacity)
        eos = frozenset() if settings.ignore_eos else self.eos
        stream, output = TextStream(self.tokenizer, prompt, settings.stops, eos), Output()
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            output.write(piece)

        def commit(tokens: list[int]) -> bool:
            write(stream.add(tokens))
            return stream.stop_reason is not None

        start = time.perf_counter()
        try:
            generation = self.generator.generate(prompt, settings.max_new_tokens, settings.sampling, eos, commit)
            write(stream.finish())
        finally:
            output.finish(self.console)
        self.console.print(describe(generation, stream.num_tokens, time.perf_counter() - start))
        return "".join(pieces)


def describe(generation: Generation, num_tokens: int, seconds: float) -> str:
    """The figures of a generation, on one line."""
    usage = Usage.of(generation)
    parts = [
        f"{num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.1f}/s), ended by {generation.stop_reason}"
    ]
    if usage.acceptance is not None:
        parts.append(f"acceptance {usage.acceptance:.1%} over {usage.num_rounds} rounds")
    if usage.hit_rate is not None:
        parts.append(f"hits {usage.hit_rate:.1%}")
    if usage.tpot_ms is not None:
        decoded = max(len(generation.tokens) - 1, 1)
        parts.append(f"link {usage.link_bytes / decoded / 1e6:.0f} MB a token")
        parts.append(f"{usage.tpot_ms:.2f} ms a token on the {generation.clock} clock")
    return " · ".join(parts)


def generate(
    choice: Choice, text: str | None, settings: Settings, console: Console, *, chat: bool, show_plan: bool = True
) -> None:
    """Continues `text`, or answers it with `chat`; without a text, holds a conversation at the terminal.

    Raises SpecterError: as `configure`; no text and no terminal; a text without tokens; no chat template.
    """
    model = find_model(choice.model, console)
    checkpoint = Path(model.checkpoint)
    spec = read_spec(checkpoint)
    tokenizer = load_tokenizer(Path(model.tokenizer), spec.vocab)
    is_conversation = text is None
    if is_conversation and not chat:
        raise SpecterError("no text is given", "give one, --file PATH, standard input, or --chat for a conversation")
    template = ChatTemplate.load(checkpoint) if chat else None
    prompt: list[int] = []
    if text is not None:
        prompt = (
            tokenizer.encode(text)
            if template is None
            else tokenizer.encode_bare(template.render(messages_of(text, settings)))
        )
    needed = len(prompt) + settings.max_new_tokens
    if is_conversation:
        needed = min(MAX_CONTEXT, spec.max_positions)
    config = configure(choice, console, needed, settings.sampling)
    check_paths(config)
    run = resolve(config)
    if text is not None:
        check_length(len(prompt), settings.max_new_tokens, config.kv_capacity)
    if show_plan:
        console.print(residency_table(run))
        if config.clock == "virtual":
            console.print(
                f"no GPU is used: the model runs on the CPU, and the virtual clock charges {config.hardware.title}"
            )
    torch.set_num_threads(config.threads)
    longest = len(prompt) if text is not None else needed - settings.max_new_tokens
    with opened(run, console, longest) as generator:
        session = Session(generator, tokenizer, settings, eos_ids(checkpoint), console)
        if text is not None:
            session.answer(prompt)
        else:
            assert template is not None
            converse(session, template)


def messages_of(text: str, settings: Settings) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [*opening(settings), {"role": "user", "content": text}]


def opening(settings: Settings) -> list[dict[str, str]]:
    """What stands before the first message: the system prompt, if there is one."""
    system = settings.system_prompt
    return [] if system is None else [{"role": "system", "content": system}]


def converse(session: Session, template: ChatTemplate) -> None:
    """Answers what is typed, until an empty line or the end of the input. Earlier turns stay in the prompt."""
    messages = opening(session.settings)
    while True:
        try:
            line = session.console.input("> ")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        prompt = session.tokenizer.encode_bare(template.render(messages))
        messages.append({"role": "assistant", "content": session.answer(prompt)})
