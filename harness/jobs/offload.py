"""Times the real transformers library with offload, and our decoder beside it, by this machine's wall clock."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from baselines import transformers_offload
from harness.jobs import model_columns, progress_bar, write_table
from harness.plan import compose
from specter.arguments import run_command
from specter.models.cpu.live import LiveModel
from specter.prompts import encode, load_tokenizer, prompt_text
from specter.resolve import resolve

NUM_TOKENS = 8


@dataclass(frozen=True)
class Options:
    """Times the transformers library with offload."""

    model: str  # a file of conf/model
    out: Path


def main(options: Options) -> None:
    config = compose([f"model={options.model}", "system=resident", "warmup_tokens=0"])
    config.max_new_tokens = NUM_TOKENS
    torch.set_num_threads(config.threads)
    prompt = encode(load_tokenizer(config), prompt_text(config), config)
    timed = transformers_offload.Options(Path(config.model.checkpoint), options.out, "cpu", NUM_TOKENS, config.threads)
    rows = transformers_offload.measure(timed, prompt)
    with progress_bar() as progress:
        run = resolve(config)
        live = LiveModel.load(run, progress)
    commits = [time.perf_counter()]
    result = live.run(run, prompt, (), lambda tokens: commits.append(time.perf_counter()))
    times = [(after - before) * 1e3 for before, after in itertools.pairwise(commits)]
    ours = {"system": "this runtime, resident, with its clock", "tokens": result.generation.tokens}
    rows.append(ours | {"ttft_ms": times[0], "tpot_ms": statistics.median(times[1:])})
    frame = pd.DataFrame(rows)
    frame["agrees_with_ours"] = [tokens == result.generation.tokens for tokens in frame["tokens"]]
    counts = {"num_prompt_tokens": len(prompt), "num_new_tokens": NUM_TOKENS, "threads": config.threads}
    write_table(options.out, frame.drop(columns="tokens").assign(**model_columns(config.model), **counts))
    print(frame[["system", "tpot_ms", "agrees_with_ours"]].to_string())


if __name__ == "__main__":
    run_command(main, Options)
