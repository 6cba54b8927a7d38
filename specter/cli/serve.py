"""`specter serve`: the checkpoint behind OpenAI's HTTP interface."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from specter.cli.choice import Choice, configure, find_model
from specter.cli.plan import residency_table
from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.generation import opened
from specter.models.hub_config import read_spec
from specter.resolve import check_paths, resolve
from specter.serving.app import Service, build_app
from specter.serving.metrics import Metrics
from specter.serving.server import Limits, bind, is_local, run
from specter.serving.worker import Worker
from specter.text.chat import ChatTemplate
from specter.text.tokenizer import eos_ids, load_tokenizer


def serve(
    choice: Choice,
    host: str,
    port: int,
    sampling: SamplingConfig,
    limits: Limits,
    console: Console,
    *,
    context: int,
    name: str | None,
    key: str | None,
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        context: tokens of a prompt and its continuation, at most those of the model. name: of the model, for requests.
    Raises:
        SpecterError: as `configure` and `bind`.
    """
    model = find_model(choice.model, console)
    checkpoint = Path(model.checkpoint)
    spec = read_spec(checkpoint)
    tokenizer = load_tokenizer(Path(model.tokenizer), spec.vocab)
    try:
        template = ChatTemplate.load(checkpoint)
    except SpecterError as error:
        template = None
        console.print(f"no chats: {error.what}")
    config = configure(choice, console, min(context, spec.max_positions), sampling)
    check_paths(config)
    resolved = resolve(config)
    bound = bind(host, port)  # before the model is loaded
    if key is None and not is_local(bound):
        console.print(f"anyone who reaches {host} can use this server; give a key with SPECTER_API_KEY", style="yellow")
    console.print(residency_table(resolved))
    torch.set_num_threads(config.threads)
    longest = config.kv_capacity - 1
    with opened(resolved, console, longest) as generator:
        metrics = Metrics()
        worker = Worker(generator, limits.max_waiting, metrics)
        service = Service(
            name or model.name, worker, metrics, tokenizer, template, eos_ids(checkpoint), spec.vocab, longest, sampling
        )
        app = build_app(service, key, limits.max_body_bytes)
        console.print(f"serving {service.name} on http://{host}:{bound.getsockname()[1]}/v1 (Ctrl-C ends it)")
        run(app, worker, bound, limits)
    console.print("ended")
