"""Checkpoints by hub id, for example `Qwen/Qwen1.5-MoE-A2.7B-Chat`, instead of a directory."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console

from specter.errors import SpecterError
from specter.models.hub_config import read_spec

if TYPE_CHECKING:
    from specter.config import RunConfig

CONFIG = "config.json"
WANTED = [  # never pickles, never code
    CONFIG, "*.safetensors", "*.safetensors.index.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
]  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(checkpoint: str) -> bool:
    """Whether this is ORG/NAME, and neither such a path nor a directory ORG exists."""
    path = Path(checkpoint)
    return bool(_HUB_ID.fullmatch(checkpoint)) and not path.exists() and not path.parent.exists()


def find_checkpoint(checkpoint: str, console: Console) -> Path:
    """The directory of a checkpoint, given as a directory or by hub id. Downloads files missing from the cache.

    config.json is checked before weights are fetched. HF_HUB_OFFLINE and HF_HOME are honoured.

    Raises SpecterError: neither a directory nor a repository, no network and nothing cached, a family that is not
    supported, or too little disk space.
    """
    if not is_hub_id(checkpoint):
        if not Path(checkpoint).is_dir():
            raise SpecterError(
                f"{checkpoint} is neither a directory nor a hub id",
                "give a checkpoint directory, or ORG/NAME of a repository on the hub",
            )
        return Path(checkpoint)
    try:
        read_spec(_fetch(checkpoint, [CONFIG]))
        if not constants.HF_HUB_OFFLINE:
            _check_disk(checkpoint, console)
        return _fetch(checkpoint, WANTED)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecterError(
            f"{checkpoint} is neither on the hub nor in the cache {constants.HF_HUB_CACHE}: {reason}",
            f"where there is network run `hf download {checkpoint}` (after `hf auth login` for a gated one), "
            "or give a local directory",
        ) from None


def with_local_paths(config: RunConfig, console: Console) -> RunConfig:
    """Replaces a hub id in model.checkpoint, and in a tokenizer path below it, by its directory."""
    model = config.model
    if not is_hub_id(model.checkpoint):
        return config
    directory = find_checkpoint(model.checkpoint, console)
    tokenizer = model.tokenizer
    if tokenizer.startswith(f"{model.checkpoint}/"):
        tokenizer = str(directory / tokenizer.removeprefix(f"{model.checkpoint}/"))
    return replace(config, model=replace(model, checkpoint=str(directory), tokenizer=tokenizer))


def _fetch(checkpoint: str, patterns: list[str]) -> Path:
    return Path(huggingface_hub.snapshot_download(checkpoint, allow_patterns=patterns))


def _check_disk(checkpoint: str, console: Console) -> None:
    files = huggingface_hub.snapshot_download(checkpoint, allow_patterns=WANTED, dry_run=True)
    wanted = [file for file in files if file.will_download]
    num_bytes = sum(file.file_size or 0 for file in wanted)
    if not wanted:
        return
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    console.print(
        f"{checkpoint}: {len(wanted)} of {len(files)} files to download, {num_bytes / 1e9:.1f} GB, to {cache} "
        f"({free / 1e9:.1f} GB free)"
    )
    if num_bytes > free:
        raise SpecterError(
            f"{checkpoint} needs {num_bytes} bytes on disk, {free} are free in {cache}",
            "free some space, or set HF_HOME to a larger disk",
        )
