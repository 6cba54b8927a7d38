"""Records the live runs that an experiment replays on one model and data set; finished recordings are kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness.jobs import ExperimentOptions, progress_bar, steps
from harness.plan import TextKey, recording_runs, text_key
from harness.recordings import Files, RecordingStore, Text, texts, write_manifest
from specter.arguments import run_command
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.files import write_json
from specter.prompts import load_tokenizer
from specter.recording import DENSE, Recording
from specter.speculation.depth import MAX_AUTO

NOTES = "notes.json"


@dataclass(frozen=True)
class Options(ExperimentOptions):
    """Records the live runs of an experiment."""

    out: Path  # the manifest


def missing_texts(pairs: list[tuple[Text, Text]], store: RecordingStore) -> list[Text]:
    """Texts without a recording, each once; plain ones first, since the others are compared with them."""
    found = {store.path(text): text for pair in pairs for text in pair if text.config.max_new_tokens}
    return [text for path, text in found.items() if not path.exists()]


def record(todo: list[Text], store: RecordingStore, loaded_as: RunConfig) -> None:
    """Generates and saves `todo`, which is not empty."""
    import torch  # takes seconds to import, and a job whose texts are all recorded does without

    from specter.models.cpu.live import LiveModel
    from specter.resolve import check_paths, resolve

    check_paths(loaded_as)
    torch.set_num_threads(loaded_as.threads)
    with progress_bar() as progress:
        model = LiveModel.load(resolve(loaded_as), progress)
        write_json(store.path(todo[0]).with_name(NOTES), model.notes)
        for text in steps(todo, f"record {loaded_as.model.name} {loaded_as.dataset.name}", progress):
            is_dense = text.config.is_auto
            config = replace(text.config, k=MAX_AUTO) if is_dense else text.config
            recording = model.run(resolve(config), text.prompt, (), commits_one=is_dense).recording
            recording.meta = {
                "model": text.config.model.name,
                "dataset": text.config.dataset.name,
                "input": str(text.config.input),
                "sampling": text.config.sampling.label,
                "k": str(text.config.depth),
                "draft": text.config.system.draft,
                "origin": store.origin,
                **({DENSE: "every position"} if is_dense else {}),
            }
            # Under a name of its own first: a job of a killed Snakemake can still be recording the same text.
            mine = store.path(text).with_name(f"{os.getpid()}-{store.path(text).name}")
            recording.save(mine)
            mine.rename(store.path(text))


def check_lossless(files: Mapping[TextKey, Files]) -> None:
    """Compares every recording with the plain one of its text. Raises SpecterError naming the first that differs."""
    tokens = {key: Recording.load(recording).tokens for key, (recording, _) in files.items()}
    for key, mine in tokens.items():
        plain = tokens[key.plain]
        if key.sampling != "rejection" and mine != plain:
            first = next(i for i, (a, b) in enumerate(zip(mine, plain, strict=True)) if a != b)
            raise SpecterError(
                f"{key} differs from plain decoding at token {first}", "report this: it is a fault of the runtime"
            )


def main(options: Options) -> None:
    configs = recording_runs(options.scale, options.experiment, options.model, options.dataset)
    drafting = next((config for config in configs if config.system.speculative), configs[0])
    tokenizer = load_tokenizer(drafting)
    store = RecordingStore(Path(drafting.results), drafting)
    pairs = [texts(config, tokenizer) for config in configs]
    todo = missing_texts(pairs, store)
    if todo:
        record(todo, store, drafting)
    files = {
        text_key(config): (store.path(text), store.path(warmup))
        for config, (text, warmup) in zip(configs, pairs, strict=True)
    }
    check_lossless(files)
    notes = json.loads(store.path(pairs[0][0]).with_name(NOTES).read_text())
    write_manifest(options.out, files, notes | {"origin": store.origin})
    print(f"{len(files)} live runs, {len(todo)} texts recorded now; all agree with plain decoding")


if __name__ == "__main__":
    run_command(main, Options)
