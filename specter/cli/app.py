"""The command `specter` and its subcommands: options in, one screen out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specter.cli.output import show_any_character
from specter.errors import SpecterError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Mixture-of-Experts models whose experts do not fit the GPU: lossless speculation with an INT4 draft.",
)

Model = Annotated[str, typer.Argument(help="A checkpoint directory, a hub id ORG/NAME, or a model of conf/model.")]
System = Annotated[str | None, typer.Option(help="Of conf/system. Default: the fastest whose files exist.")]
Budget = Annotated[
    str | None, typer.Option(help="Device memory in all, such as 24GB, or a tier (high, low). Default: the whole card.")
]
Depth = Annotated[str | None, typer.Option("--k", help="Draft tokens a round, or auto.")]
Machine = Annotated[str | None, typer.Option(help="Of conf/hardware: charge this machine instead of using a GPU.")]
Int4 = Annotated[Path | None, typer.Option(help="Directory of the INT4 draft, if not the default one.")]
Residual = Annotated[Path | None, typer.Option(help="Directory of the residual experts, if not the default one.")]


def errors() -> Console:
    """Where messages go, so that standard output has the text alone. Brackets in a path or a text are no markup."""
    return Console(stderr=True, highlight=False, markup=False)


def read_depth(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


@app.command("generate")
def generate_command(
    model: Model,
    text: Annotated[str | None, typer.Argument(help="The text to continue. Default: standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to continue.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer by the checkpoint's chat template.")] = False,
    system_prompt: Annotated[str | None, typer.Option(help="The system message of a chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end of a text.")] = False,
    system: System = None,
    budget: Budget = None,
    k: Depth = None,
    hardware: Machine = None,
    int4: Int4 = None,
    residual: Residual = None,
) -> None:
    """Continue a text, or hold a conversation (--chat without a text)."""
    from specter.cli.choice import Choice
    from specter.cli.generate import Settings, generate, given_text
    from specter.config import SamplingConfig

    sampling = SamplingConfig("seeded", temperature=temperature, seed=seed) if temperature else SamplingConfig("greedy")
    settings = Settings(max_new_tokens, sampling, stop or (), ignore_eos, system_prompt)
    choice = Choice(model, system, budget, read_depth(k), hardware, int4, residual)
    generate(choice, given_text(text, file), settings, errors(), chat=chat)


@app.command("plan")
def plan_command(
    model: Model,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a prompt and its continuation.")] = 256,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Assumed, of one draft token.")] = 0.95,
    system: System = None,
    budget: Budget = None,
    hardware: Machine = None,
    int4: Int4 = None,
    residual: Residual = None,
) -> None:
    """Show what fits where, and what a token moves and takes by system and depth. Loads no weights."""
    from specter.cli.choice import Choice
    from specter.cli.plan import plan

    choice = Choice(model, system, budget, None, hardware, int4, residual)
    plan(choice, context, acceptance, Console(highlight=False, markup=False))


@app.command("quantize")
def quantize_command(
    model: Model,
    method: Annotated[str, typer.Option(help="gptq, awq or rtn.")] = "gptq",
    calibration: Annotated[Path | None, typer.Option(help="A text file. Default: the shipped text.")] = None,
    with_residual: Annotated[bool, typer.Option("--residual-experts/--no-residual-experts")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU where there is one.")] = None,
    int4: Int4 = None,
    residual: Residual = None,
) -> None:
    """Make the INT4 draft and the residual experts of a checkpoint. An interrupted run resumes."""
    from specter.cli.choice import Choice
    from specter.cli.quantize import quantize

    choice = Choice(model, int4=int4, residual=residual)
    quantize(choice, errors(), method=method, calibration=calibration, with_residual=with_residual, device=device)


@app.command("serve")
def serve_command(
    model: Model,
    host: Annotated[str, typer.Option(help="Where to listen. Default: this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="SPECTER_API_KEY", help="Required of requests. Better given as the variable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the model, in requests. Default: the checkpoint's.")] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a prompt and its answer, at most.")] = 4096,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of requests that state none.")] = 0.0,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests in the line; one more gets a 429.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="A longer body gets a 413.")] = 2**20,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that requests have to end when the server does.")] = 30,
    system: System = None,
    budget: Budget = None,
    k: Depth = None,
    hardware: Machine = None,
    int4: Int4 = None,
    residual: Residual = None,
) -> None:
    """Serve a model through OpenAI's HTTP interface (docs/serving.md)."""
    from specter.cli.choice import Choice
    from specter.config import SamplingConfig

    try:
        from specter.cli.serve import Limits, serve
    except ModuleNotFoundError as error:
        raise SpecterError(f"serving needs {error.name}", "pip install 'specter-artifact[serve]'") from None
    sampling = SamplingConfig("seeded", temperature=temperature) if temperature else SamplingConfig("greedy")
    choice = Choice(model, system, budget, read_depth(k), hardware, int4, residual)
    limits = Limits(max_waiting, max_body_bytes, grace)
    serve(choice, host, port, sampling, limits, errors(), context=context, name=name, key=api_key)


@app.command("doctor")
def doctor_command() -> None:
    """Examine GPU, link, memory, disk and compiler: what this machine can run, and what to change."""
    from specter.cli.doctor import examine, table

    Console(highlight=False).print(table(examine()))


def main() -> None:
    """Runs a subcommand; what is wrong ends on one screen with exit status 2."""
    run: Callable[[], None] = app
    for stream in (sys.stdout, sys.stderr):
        show_any_character(stream)
    try:
        run()
    except SpecterError as error:
        errors().print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a path that may not be read
        sys.stdout = None  # else the interpreter flushes it at exit, and fails
        what = error.filename or "standard output"
        errors().print(f"error: {what}: {error.strerror}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors().print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
