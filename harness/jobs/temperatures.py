"""What a text is like at each temperature, and what it makes of the systems: `python -m harness.jobs.temperatures`.

Records texts live, greedy and seeded over a grid of temperatures, and replays systems on them. Rows of the long table:
`acceptance` (num: examined drafts), `union` by K and `distinct_4grams` per text; `hit_rate` of LRU on plain decoding by
slots per layer; `tpot_ms` per system and tier at equal bytes. Virtual clock; recordings are kept, so a run resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import model_columns, write_table
from harness.jobs.record import missing_texts, record
from harness.plan import compose
from harness.recordings import RecordingStore, load_files, texts
from specter.arguments import run_command
from specter.config import RunConfig
from specter.metrics import Metrics, distinct_4grams
from specter.models.hub_config import read_spec
from specter.probes.routing import acceptance, decoded_routing, union_sizes
from specter.prompts import load_tokenizer
from specter.recording import Recording
from specter.resolve import resolve
from specter.session import Replayer

SYSTEMS = ("lru", "specter", "specter_deadline")
TIERS = ("high", "low")
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """One model; K is the paper's."""

    model: str
    out: Path
    temperatures: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # beside greedy decoding
    datasets: tuple[str, ...] = ("gsm8k", "humaneval", "prose")
    num_inputs: int = 1
    slots: tuple[int, ...] = (6, 16, 32)  # per layer, for LRU's hit rate, beside the tiers'
    warmup_tokens: int = 64
    recordings: Path = Path("results/temperatures")


def plain_and_drafting(overrides: list[str]) -> list[RunConfig]:
    """The live runs of one text: a plain one and one that drafts, with all experts on the device."""
    recorder = ["system=specter", "system.name=recorder", "system.planner=none", "system.eviction=resident"]
    return [compose([*overrides, "system=resident"]), compose([*overrides, *recorder])]


def text_rows(plain: Recording, drafting: Recording, num_experts: int) -> Iterator[Row]:
    """What a text is like."""
    accepted, examined = acceptance([drafting])
    yield {"quantity": "acceptance", "value": accepted / max(examined, 1), "num": examined}
    yield {"quantity": "distinct_4grams", "value": distinct_4grams(plain.tokens)}
    for k, size in union_sizes(decoded_routing(plain), num_experts, (1, 2, 4, 8, 16, 32)).items():
        yield {"quantity": "union", "k": k, "value": size}


def _replay(replayer: Replayer, text: list[str], files: list[tuple[Recording, Recording]], *more: str) -> Metrics:
    """A text through a system; `files`: recording and warm-up of plain decoding, and of drafting."""
    config = compose([*text, *more])
    return replayer.replay(resolve(config), *files[config.system.speculative]).metrics


def measure(options: Options) -> pd.DataFrame:
    """All rows of one model."""
    rows: list[Row] = []
    for temperature in (0.0, *options.temperatures):  # 0: greedy
        kind = ["sampling=seeded", f"sampling.temperature={temperature}"] if temperature else ["sampling=greedy"]
        named = {"sampling": "seeded" if temperature else "greedy", "temperature": temperature}
        given = [f"model={options.model}", *kind, f"warmup_tokens={options.warmup_tokens}", "max_new_tokens=128"]
        overrides = [
            [*given, f"dataset={dataset}", f"input={index}"]
            for dataset in options.datasets
            for index in range(options.num_inputs)
        ]
        pairs = [plain_and_drafting(one) for one in overrides]
        store = RecordingStore(options.recordings / options.model, pairs[0][1])
        tokenizer = load_tokenizer(pairs[0][1])
        found = [[texts(config, tokenizer) for config in pair] for pair in pairs]
        if todo := missing_texts([pair for one in found for pair in one], store):
            record(todo, store, pairs[0][1])
        replayer = Replayer()
        for one, (plain, drafting) in zip(overrides, found, strict=True):
            files = [load_files((store.path(pair[0]), store.path(pair[1]))) for pair in (plain, drafting)]
            config = plain[0].config
            of_text = named | {"dataset": config.dataset.name, "input": config.input}
            num_experts = read_spec(Path(config.model.checkpoint)).num_experts
            rows += [of_text | row for row in text_rows(files[0][0], files[1][0], num_experts)]

            run = partial(_replay, replayer, one, files)
            tiers = [config.model.residents[tier] for tier in TIERS]
            for slots in sorted({*options.slots, *tiers}):
                if slots < num_experts:
                    budget = (f"budget.experts_per_layer={slots}", "budget.policy=same_experts")
                    rate = run("system=lru", *budget)["hit_rate"]
                    rows.append(of_text | {"quantity": "hit_rate", "k": slots, "system": "lru", "value": rate})
            for system in SYSTEMS:
                for tier in TIERS:
                    tpot = run(f"system={system}", f"budget={tier}")["tpot_ms"]
                    rows.append(of_text | {"quantity": "tpot_ms", "system": system, "tier": tier, "value": tpot})
        print(f"{options.model}: T = {temperature:g} done", flush=True)
    config = compose([f"model={options.model}"])
    kept = pd.DataFrame(rows).assign(
        **model_columns(config.model), hardware=config.hardware.name, clock="virtual", recorded_k=config.k
    )
    return kept.assign(**{key: kept[key].fillna("") for key in ("system", "tier")}, k=kept["k"].fillna(0).astype(int))


def main(options: Options) -> None:
    write_table(options.out, measure(options))


if __name__ == "__main__":
    run_command(main, Options)
