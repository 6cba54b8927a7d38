"""Measures a draft: fidelity per layer, acceptance, accepted runs, expert union and repetition, as one long table.

Greedy and seeded rows come from the recordings, at the K recorded most often; teacher-forced ones from held-out texts,
whose number the scale gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from harness.jobs import model_columns, progress_bar, steps, write_table
from harness.plan import ProbePlan, TextKey, probe_plan
from harness.recordings import Files, read_manifest
from specter.arguments import run_command
from specter.metrics import distinct_4grams
from specter.models.cpu.live import LiveModel
from specter.models.hub_config import read_spec
from specter.probes.routing import (
    acceptance,
    accepted_runs,
    decoded_routing,
    generated_matches,
    match,
    named_and_used,
    runs_of,
    union_sizes,
)
from specter.probes.teacher import force
from specter.prompts import load_tokenizer, shipped_texts
from specter.recording import Recording
from specter.resolve import resolve
from specter.speculation.drafts import SHARED

HELD_OUT = Path("data/prompts/heldout.jsonl")
WINDOWS = range(1, 33)
FORCED_WINDOW = 16  # the paper's K
SLOTS = (6, 16, 32)  # per layer, of the paper's hit rates
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Measures the draft of one model at a scale."""

    scale: str
    model: str
    manifests: tuple[Path, ...]  # of the experiment `main`, one of each data set
    out: Path


def draft_rows(matches: NDArray[np.float64], num_accepted: int, num_examined: int, runs: list[int]) -> Iterator[Row]:
    """Fidelity by layer from matches [N, MoE layers], acceptance, and how many accepted runs have each length `k`."""
    for layer, value in enumerate(matches.mean(0)):
        yield {"quantity": "fidelity", "layer": layer, "value": float(value), "num": len(matches)}
    yield {"quantity": "acceptance", "value": num_accepted / num_examined, "num": num_examined}
    for length, count in sorted(Counter(runs).items()):
        yield {"quantity": "run", "k": length, "value": float(count), "num": len(runs)}


def text_rows(routing: NDArray[np.int16], num_experts: int, tokens: list[int]) -> Iterator[Row]:
    """Expert union by window `k`, and repetition."""
    for k, value in union_sizes(routing, num_experts, WINDOWS).items():
        yield {"quantity": "union", "k": k, "value": value, "num": len(routing)}
    yield {"quantity": "distinct_4grams", "value": distinct_4grams(tokens), "num": len(tokens)}


def generated_rows(files: Mapping[TextKey, Files], sampling: str, num_experts: int) -> Iterator[Row]:
    """Rows of one data set and sampling."""
    mine = {key: pair for key, pair in files.items() if key.sampling == sampling and key.draft == SHARED}
    recorded = Counter(key.k for key in mine if key.k)
    k = max(recorded, key=lambda depth: (recorded[depth], depth))
    drafted, plain = ([Recording.load(one) for key, (one, _) in mine.items() if key.k == depth] for depth in (k, 0))
    yield from draft_rows(generated_matches(drafted), *acceptance(drafted), accepted_runs(drafted))
    for slots, value in named_and_used(drafted, num_experts, SLOTS).items():
        yield {"quantity": "named_used", "k": slots, "value": value, "num": len(drafted)}
    for recording in plain:
        yield from text_rows(decoded_routing(recording), num_experts, recording.tokens)


def forced_rows(model: LiveModel, tokens: list[int]) -> Iterator[Row]:
    """Rows of one held-out text."""
    forced = force(model, tokens, FORCED_WINDOW)
    matches = match(forced.draft_routing, forced.target_routing)
    yield from draft_rows(matches, int(forced.agrees.sum()), len(forced.agrees), runs_of(forced.agrees))
    yield from text_rows(forced.target_routing, model.decoder.num_experts, tokens)


def measure(plan: ProbePlan, manifests: Sequence[Path]) -> list[Row]:
    """All rows of one model."""
    config = plan.base
    tokenizer = load_tokenizer(config)
    texts = [tokenizer.encode(text) for text in shipped_texts(HELD_OUT)[: plan.num_texts]]
    rows: list[Row] = []
    if texts:
        with progress_bar() as progress:
            model = LiveModel.load(resolve(config), progress)
            for tokens in steps(texts, f"probe {config.model.name}", progress):
                cut = tokens[: config.kv_capacity - config.tile_rows]
                rows += [{"mode": "teacher-forced", "dataset": HELD_OUT.stem} | row for row in forced_rows(model, cut)]
    num_experts = read_spec(Path(config.model.checkpoint)).num_experts
    for path in manifests:
        files, _ = read_manifest(path)
        for sampling in sorted({key.sampling for key in files}):
            found = generated_rows(files, sampling, num_experts)
            named = {"mode": sampling, "dataset": path.stem, "temperature": plan.temperatures[sampling]}
            rows += [named | row for row in found]
    return rows


def main(options: Options) -> None:
    plan = probe_plan(options.scale, options.model)
    torch.set_num_threads(plan.base.threads)
    named = model_columns(plan.base.model) | {"layer": -1, "k": 0}
    frame = pd.DataFrame([named | row for row in measure(plan, options.manifests)])
    write_table(options.out, frame)
    means = frame.groupby(["quantity", "mode"])["value"].mean().unstack()
    print(means.loc[["fidelity", "acceptance", "distinct_4grams"]].to_string(float_format="%.4f"))


if __name__ == "__main__":
    run_command(main, Options)
