"""One run from the command line: `python -m specter.run system=specter dataset=gsm8k budget=high k=16`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hydra
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from specter.config import RunConfig, from_values
from specter.engine import check_length
from specter.errors import SpecterError
from specter.files import check_writable
from specter.generation import load_model
from specter.hub import with_local_paths
from specter.models.hub_config import read_spec
from specter.models.rope import check_prompt
from specter.progress import make_progress
from specter.prompts import encode, load_tokenizer, prompt_text, read_text, warmup_text
from specter.resolve import check_paths, resolve
from specter.results import adhoc_directory, run_id, write_run
from specter.session import OnCommit, RunResult
from specter.text.tokenizer import Tokenizer


def summary(config: RunConfig, result: RunResult) -> Table:
    """The summary of a run, as a table for the terminal."""
    metrics = result.metrics

    def number(key: str, unit: str = "", digits: int = 2) -> str:
        value = metrics.get(key)
        return "–" if value is None else f"{value:.{digits}f}{unit}"

    machine = f"{metrics['clock']} clock, {config.hardware.name}, {config.model.checkpoint_kind} checkpoint"
    table = Table(title=f"{run_id(config)}\n{machine}", show_header=False, title_justify="left")
    table.add_row("TPOT", number("tpot_ms", " ms"), "after the first round", number("tpot_after_first_round_ms", " ms"))
    table.add_row("TTFT", number("ttft_ms", " ms"), "end to end", number("end_to_end_ms", " ms"))
    table.add_row("x floor_trace", number("over_floor_trace"), "x floor_ideal", number("over_floor_ideal"))
    table.add_row("acceptance", number("acceptance", digits=4), "accepted a round", number("mean_accepted_len"))
    hits = f"{metrics.get('num_hits')} / {metrics.get('num_late_hits')} / {metrics.get('num_misses')}"
    length = f"{metrics['num_new_tokens']}, ended by {metrics['stop_reason']}"
    table.add_row("new tokens", length, "acceptance to EOS", number("acceptance_to_eos", digits=4))
    table.add_row("hits / late / misses", hits, "experts a layer, distinct", number("union_mean"))
    table.add_row("link bytes", f"{metrics.get('link_bytes', 0) / 1e9:.2f} GB", "link busy", number("link_busy_frac"))
    table.add_row("stall", number("stall_ms", " ms"), "distinct 4-grams", number("distinct_4grams"))
    total, capacity = metrics["device_total_bytes"] / 1e9, config.hardware.device_memory_bytes / 1e9
    table.add_row("device memory", f"{total:.1f} of {capacity:.1f} GB", "slots", str(metrics["num_slots"]))
    if not metrics["fits_device"]:
        table.add_row("note", "this does NOT fit this device", "", "")
    if metrics["fits_without_offloading"]:
        table.add_row("note", "this model fits this device without offloading", "", "")
    agrees = {True: "equal, bit for bit", False: "DIFFERENT", None: "not comparable (rejection sampling)"}
    table.add_row("against plain decoding", agrees[metrics["agrees_with_plain"]], "", "")
    return table


def encode_texts(config: RunConfig, tokenizer: Tokenizer, console: Console) -> tuple[list[int], list[int]]:
    """The prompt and the text before the warm-up, as tokens.

    Raises:
        SpecterError: one of them is empty, or too long for the KV cache or the model.
    """
    text = prompt_text(config)
    prompt, warmup = encode(tokenizer, text, config), encode(tokenizer, warmup_text(), config)
    whole = len(tokenizer.encode(text))
    if len(prompt) < whole:
        console.print(f"prompt cut to its first {len(prompt)} of {whole} tokens (prompt_tokens=0 keeps it whole)")
    check_length(len(prompt), config.max_new_tokens, config.kv_capacity)
    if len(warmup) + config.warmup_tokens > config.kv_capacity:
        raise SpecterError(
            f"warmup_tokens={config.warmup_tokens} after {len(warmup)} tokens exceed kv_capacity={config.kv_capacity}",
            f"use warmup_tokens <= {config.kv_capacity - len(warmup)}, or a larger kv_capacity",
        )
    spec = read_spec(Path(config.model.checkpoint))
    for tokens in (prompt, warmup):
        check_prompt(spec, config.kv_capacity, len(tokens))
    return prompt, warmup


def run(config: RunConfig, console: Console) -> None:
    """Runs one configuration live, writes its directory, prints text and summary."""
    directory = adhoc_directory(config)
    config = with_local_paths(config, console)
    check_paths(config)
    resolved = resolve(config)
    check_writable(directory)
    tokenizer = load_tokenizer(config)
    prompt, warmup = encode_texts(config, tokenizer, console)
    live = load_model(resolved, console)
    with make_progress(console) as progress:
        num_texts = 1 if config.sampling.kind == "rejection" else 2  # the run, and plain decoding to compare with
        task = progress.add_task("tokens", total=config.warmup_tokens + num_texts * config.max_new_tokens)
        count: OnCommit = lambda tokens: progress.advance(task, len(tokens))  # noqa: E731
        result = live.run(resolved, prompt, warmup, count)
        result.metrics["agrees_with_plain"] = live.agrees_with_plain(resolved, result, count)
    write_run(directory, config, result, live.notes)
    console.print(tokenizer.decode([*prompt, *result.generation.tokens]), markup=False, highlight=False)
    console.print(summary(config, result))
    console.print(f"written to {directory}")
    if result.metrics["agrees_with_plain"] is False:
        raise SpecterError("the output differs from plain decoding", "report this: it is a fault of the runtime")


def take_prompt(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Takes `prompt=TEXT` or `prompt_file=PATH` (`-`: standard input) out of a command line; returns the rest and the
    text. Hydra would read quotes, commas, braces and `${...}` in a text as its own.

    Raises SpecterError: two of them, or as `read_text`.
    """
    is_text = [argument.startswith(("prompt=", "prompt_file=")) for argument in arguments]
    rest = [argument for argument, taken in zip(arguments, is_text, strict=True) if not taken]
    texts = [argument for argument, taken in zip(arguments, is_text, strict=True) if taken]
    if not texts:
        return rest, None
    if len(texts) > 1:
        raise SpecterError("several prompts are given", "give one prompt=TEXT, or one prompt_file=PATH")
    key, _, value = texts[0].partition("=")
    if key == "prompt_file":
        value = read_text(None if value == "-" else Path(value))
    if not value.strip():
        raise SpecterError("the prompt is empty", "give a text, or leave prompt out to use the data set")
    return rest, value


def check_overrides(arguments: Sequence[str]) -> None:
    """Raises SpecterError for an argument that Hydra cannot parse; its own message is a parser's."""
    for argument in arguments:
        if "=" in argument and not argument.startswith("-"):
            try:
                OverridesParser.create().parse_override(argument)
            except HydraException:
                raise SpecterError(
                    f"argument {argument!r} is not understood",
                    "use key=value; in quotes of its own, key='\"a value\"', a value may have any character",
                ) from None


@contextmanager
def one_screen() -> Iterator[None]:
    """Ends the program with an error's one screen."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing of this run was written")
    except SpecterError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def main(arguments: Sequence[str]) -> None:
    """Runs the command line: one run, or with `-m` several."""
    with one_screen():
        rest, text = take_prompt(arguments)
        check_overrides(rest)

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def run_one(values: DictConfig) -> None:
        console = Console(stderr=False, width=None if sys.stdout.isatty() else 110)
        with one_screen():
            config = replace(from_values(values), prompt=text)
            torch.set_num_threads(config.threads)
            run(config, console)

    sys.argv[1:] = rest
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    run_one()


if __name__ == "__main__":
    main(sys.argv[1:])
