"""The runs that a report can be read down to: their configuration, metrics, rounds and text."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.plan import text_key
from harness.plotting.titles import title
from harness.recordings import load_files, read_manifest
from specter.config import RunConfig
from specter.files import read_object
from specter.prompts import load_tokenizer
from specter.results import read_config

# Columns of rounds: all of `specter.records.RoundRecord` that a reader follows over time.
ROUND = (
    "start_ms", "draft_end_ms", "end_ms", "draft_len", "accepted_len", "new_len", "num_hits", "num_late_hits",
    "num_misses", "stall_ms", "link_busy_ms", "compute_busy_ms", "prefetch_bytes", "fetch_bytes",
)  # fmt: skip
ONE_INPUT = 0  # of each data set


def runs_of(directories: Sequence[Path], manifests: Sequence[Path]) -> dict[str, Any]:
    """The runs of input `ONE_INPUT` in these directories, in the order of their names.

    Args:
        directories: results/<scale>/<experiment>/<model>/<data set>; of each the manifest with the same index.

    Returns:
        runs: [name, path, title, config (YAML), env, metrics, rounds (by column), text (index into texts)].
        texts: [prompt, continuation] of each text; losslessness makes it the same for all systems.
    """
    found, texts = [], dict[tuple[str, ...], tuple[int, list[str]]]()
    for directory, manifest in zip(directories, manifests, strict=True):
        files, _ = read_manifest(manifest)
        for path in sorted(one for one in directory.iterdir() if one.is_dir()):
            config = read_config(path)
            if config.input != ONE_INPUT:
                continue
            key = text_key(config).plain
            named = (config.model.name, config.dataset.name, *map(str, key))
            if named not in texts and key in files:
                texts[named] = (len(texts), _text(config, files[key]))
            found.append(_run(path, config) | {"text": texts.get(named, (None,))[0]})
    return {"round": list(ROUND), "runs": found, "texts": [text for _, text in texts.values()]}


def _run(path: Path, config: RunConfig) -> dict[str, Any]:
    system, at = title("system", config.system.name), title("model", config.model.name)
    depth = f", K = {config.depth}" if config.depth else ""
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return {
        "name": path.name,
        "path": "/".join(path.parts[-4:]),
        "experiment": path.parts[-4],
        "model": at,
        "system": system + depth,
        "config": (path / "config.yaml").read_text(),
        "env": _object(path / "env.json"),
        "metrics": _object(path / "metrics.json"),
        "rounds": [[_short(one[column]) for column in ROUND] for one in rounds],
        "command": command(config),
    }


def command(config: RunConfig) -> str:
    """The command that repeats the run alone, with its trace for https://ui.perfetto.dev."""
    at = config.budget.experts_per_layer
    budget = f"budget={config.budget.tier}" if at is None else f"budget.experts_per_layer={at:g}"
    depth = f" k={config.depth}" if config.system.speculative and config.system.draft_len is None else ""
    bits = "" if config.payload_bits is None else f" payload_bits={config.payload_bits:g}"
    clock = "" if config.clock == "virtual" else f" clock={config.clock}"
    return (
        f".venv/bin/python -m specter.run model={config.model.name} system={config.system.name} "
        f"dataset={config.dataset.name} input={config.input} {budget} budget.policy={config.budget.policy}{depth} "
        f"sampling={config.sampling.label} hardware={config.hardware.name} prompt_tokens={config.prompt_tokens}{bits} "
        f"max_new_tokens={config.max_new_tokens} warmup_tokens={config.warmup_tokens}{clock} trace=true"
    )


def _text(config: RunConfig, files: tuple[Path, Path]) -> list[str]:
    recording, _ = load_files(files)
    tokenizer = load_tokenizer(config)
    prompt = tokenizer.decode(recording.prompt)
    return [prompt, tokenizer.decode([*recording.prompt, *recording.tokens]).removeprefix(prompt)]


def _object(path: Path) -> dict[str, Any]:
    return read_object(path, "delete the directory and run the workflow again")


def _short(value: float) -> float:
    """Microseconds are enough to read."""
    return round(value, 3)


def packed(value: Any) -> str:
    """JSON, compressed with gzip and in base64, as the page unpacks it; equal values give equal text."""
    return base64.b64encode(gzip.compress(json.dumps(value, separators=(",", ":")).encode(), 9, mtime=0)).decode()


def environments(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What the runs state of their machine and inputs, each with its distinct values."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in run["env"].items():
            found.setdefault(key, {})[str(value)] = None
    for key, values in found.items():
        yield key.replace("_", " "), ", ".join(values)
