"""How the K of a round is best chosen: `python -m harness.jobs.depths`.

The paper's profile: every K of its sweep on 25 texts, and the best K by data set, which runs read as `k=profiled`
(option `profile`). Beside it on the same texts: the K of every round by `k=auto`, and an oracle. One dense recording
of each text serves all of them. Rows of the long table: `tpot_ms` and `draft_len` (mean) by `depth`: a K, `auto` or
`oracle`. Virtual clock; recordings are kept, so a run resumes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.jobs import model_columns, write_table
from harness.jobs.record import missing_texts, record
from harness.plan import compose
from harness.recordings import RecordingStore, load_files, texts
from specter import provenance
from specter.arguments import run_command
from specter.config import RunConfig
from specter.prompts import load_tokenizer
from specter.recording import Recording, ReplayModel
from specter.records import Generation
from specter.resolve import resolve
from specter.session import Replayer, build_engine
from specter.speculation.accept import TokenSampler
from specter.speculation.depth import AUTO, MAX_AUTO, Depth
from specter.speculation.profile import ProfileKey, write_profile

ORACLE = "oracle"
TIERS = ("high", "low")
Row = dict[str, Any]
Pair = tuple[Recording, Recording]  # of a text, and of the warm-up


@dataclass(frozen=True)
class Options:
    """One model. The K are the paper's."""

    model: str
    out: Path
    profile: Path | None = None  # file of the best K of every data set
    samplings: tuple[str, ...] = ("greedy",)
    systems: tuple[str, ...] = ("specter", "specter_deadline")
    ks: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 20, 24, 32)
    datasets: tuple[str, ...] = ("gsm8k", "humaneval", "prose", "questions", "webtext")
    num_inputs: int = 5
    recordings: Path = Path("results/depths")


class Oracle(Depth):
    """Drafts as many tokens as will be accepted, from dense recordings of the generations that follow."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        super().__init__(MAX_AUTO)
        self._generations = iter(recordings)

    def begin(self) -> None:
        recording = next(self._generations)
        self._runs, self._num_tokens = accepted_from(recording), len(recording.tokens)

    def choose(self, limit: int, present: Callable[[], NDArray[np.bool_]]) -> int:
        return min(self._runs[self._num_tokens - 1 - limit], limit, self.max_len)


def accepted_from(recording: Recording) -> list[int]:
    """How many tokens of the draft from each position of a dense recording are accepted; of prefill's, none."""
    text = recording.tokens
    runs = [0]
    for index, one in enumerate(recording.passes[1:], start=1):
        agrees = [draft == token for draft, token in zip(one.tokens[1:], text[index:], strict=False)]
        runs.append(agrees.index(False) if False in agrees else len(agrees))
    return runs


def _replay_oracle(config: RunConfig, pair: Pair) -> Generation:
    run, (text, warmup) = resolve(config), pair
    model = ReplayModel([text, warmup], run.spec.num_dense_layers, run.spec.num_experts)
    engine = build_engine(run, model, TokenSampler())
    engine.depth = Oracle([warmup, text])
    engine.generate(warmup.prompt, config.warmup_tokens)
    return engine.generate(text.prompt, config.max_new_tokens)


def tpot_ms(generation: Generation) -> float:
    """See `specter.metrics.summarize`."""
    return (generation.rounds[-1].end_ms - generation.prefill_end_ms) / (len(generation.tokens) - 1)


def measure(options: Options, sampling: str) -> Iterator[Row]:
    """All rows of one sampling."""
    base = [f"model={options.model}", f"sampling={sampling}"]
    keys = [(dataset, index) for index in range(options.num_inputs) for dataset in options.datasets]
    recorder = [
        "system=specter",
        "system.name=recorder",
        "system.planner=none",
        "system.eviction=resident",
        f"k={AUTO}",
    ]
    configs = [compose([*base, f"dataset={dataset}", f"input={index}", *recorder]) for dataset, index in keys]
    store, tokenizer = RecordingStore(options.recordings / options.model, configs[0]), load_tokenizer(configs[0])
    found = [texts(config, tokenizer) for config in configs]
    if todo := missing_texts(found, store):
        record(todo, store, configs[0])
    pairs = [load_files((store.path(text), store.path(warmup))) for text, warmup in found]
    for system in options.systems:
        for tier in TIERS:
            replayer = Replayer()
            named: Row = {"system": system, "budget": tier, "sampling": sampling}
            for depth in (*map(str, options.ks), AUTO, ORACLE):
                # One configuration for all texts, so that they share a warm-up.
                config = compose(
                    [*base, f"system={system}", f"budget={tier}", f"k={AUTO if depth == ORACLE else depth}"]
                )
                named |= {"temperature": config.sampling.temperature, "hardware": config.hardware.name, "depth": depth}
                for (dataset, index), pair in zip(keys, pairs, strict=True):
                    if depth == ORACLE:
                        made = _replay_oracle(config, pair)
                    else:
                        made = replayer.replay(resolve(config), *pair).generation
                    assert made.tokens == pair[0].tokens  # losslessness
                    lens = statistics.fmean(one.draft_len for one in made.rounds)
                    yield named | {"dataset": dataset, "input": index, "tpot_ms": tpot_ms(made), "draft_len": lens}
            print(f"{options.model} {sampling} {system} {tier} done", flush=True)


def best_depths(frame: pd.DataFrame, residents: dict[str, float]) -> dict[ProfileKey, int]:
    """The K of the least mean TPOT of every system, budget, sampling and data set; of equal ones, the least."""
    fixed = frame[~frame["depth"].isin((AUTO, ORACLE))]
    fixed = fixed.assign(k=fixed["depth"].astype(int), per_layer=fixed["budget"].map(residents).astype(float))
    keys = ["system", "hardware", "per_layer", "sampling", "temperature", "dataset"]
    means = fixed.groupby([*keys, "k"])["tpot_ms"].mean().unstack("k")
    return {ProfileKey(*key): int(k) for key, k in means.idxmin(axis=1).items()}  # type: ignore[misc]


def main(options: Options) -> None:
    rows = [row for sampling in options.samplings for row in measure(options, sampling)]
    config = compose([f"model={options.model}"])
    frame = pd.DataFrame(rows).assign(**model_columns(config.model), clock="virtual")
    write_table(options.out, frame)
    if options.profile is not None:
        host = provenance.of_host()
        notes = {
            "clock": "virtual",
            "checkpoint": f"{config.model.checkpoint_kind}, {config.model.checkpoint}",
            "texts": f"{len(options.datasets)} data sets x {options.num_inputs} inputs, 128 tokens after a warm-up",
            "ks": ", ".join(map(str, options.ks)),
            **{key: str(host[key]) for key in ("commit",) if key in host},
        }
        write_profile(options.profile, best_depths(frame, config.model.residents), notes)


if __name__ == "__main__":
    run_command(main, Options)
