"""Recordings on disk: one file per text, named by everything that decides its content.

A job that was killed finds the recordings that it had finished, and jobs share warm-ups. A changed checkpoint, draft or
source file changes the directory, so an old recording is never read in its place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from harness.plan import TextKey
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.files import write_json
from specter.prompts import encode, prompt_text, warmup_text
from specter.recording import Recording
from specter.sources import code_digest
from specter.text.tokenizer import Tokenizer

RECORDING, WARMUP = "recording.safetensors", "warmup.safetensors"  # beside a run that was measured on a device
Files = tuple[Path, Path]  # the recording of a run, and that of its warm-up


@dataclass(frozen=True)
class Text:
    """One text to generate live: a configuration without warm-up, and the prompt that it continues."""

    config: RunConfig
    prompt: list[int]


def texts(config: RunConfig, tokenizer: Tokenizer) -> tuple[Text, Text]:
    """The text of a run and that of its warm-up, each of which is recorded on its own, and beyond EOS: replays of the
    same recording end there or not."""
    alone = dataclasses.replace(config, warmup_tokens=0, ignore_eos=True)
    warmup = dataclasses.replace(alone, max_new_tokens=config.warmup_tokens)
    return (
        Text(alone, encode(tokenizer, prompt_text(config), config)),
        Text(warmup, encode(tokenizer, warmup_text(), config)),
    )


class RecordingStore:
    """The recordings of one model, draft and state of the code, under `root`."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        digest = hashlib.sha256()
        for directory in (config.model.checkpoint, config.model.quantized):
            for path in sorted([Path(directory) / "config.json", *Path(directory).glob("*.safetensors")]):
                digest.update(path.read_bytes())
        digest.update(version("torch").encode())
        digest.update(code_digest("specter.models.cpu.live", "baselines").encode())
        self.origin = digest.hexdigest()[:16]
        self._directory = root / self.origin

    def path(self, text: Text) -> Path:
        """The file of this text's recording, whether or not it exists."""
        config = text.config
        key = {
            "prompt": text.prompt,
            "sampling": dataclasses.asdict(config.sampling),
            "k": config.depth,
            "draft": config.system.draft,
            "max_new_tokens": config.max_new_tokens,
            "tile_rows": config.tile_rows,
            "kv_capacity": config.kv_capacity,
            "threads": config.threads,
        }
        return self._directory / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.safetensors"


def write_manifest(path: Path, files: Mapping[TextKey, Files], notes: dict[str, str]) -> None:
    """Writes the files of every recorded run, with the notes of the model that was recorded."""
    rows = [
        {"key": key, "recording": str(recording), "warmup": str(warmup)} for key, (recording, warmup) in files.items()
    ]
    write_json(path, {"notes": notes, "recordings": rows})


def read_manifest(path: Path) -> tuple[dict[TextKey, Files], dict[str, str]]:
    """Files by key, and notes, as `write_manifest` takes them."""
    values = json.loads(path.read_text())
    files = {TextKey(*row["key"]): (Path(row["recording"]), Path(row["warmup"])) for row in values["recordings"]}
    return files, values["notes"]


def load_files(files: Files) -> tuple[Recording, Recording]:
    """The recording of a run and that of its warm-up. Raises SpecterError for a file that is missing or damaged."""
    try:
        return Recording.load(files[0]), Recording.load(files[1])
    except SpecterError as error:
        raise SpecterError(
            error.what, "delete it and the manifests that name it (results/<scale>/manifests), and run again"
        ) from None
