"""Routing fidelity by method and precision, as one long table: `python -m harness.jobs.fidelity model=... probe=...`.

Rows have a `quantity`: per request and MoE layer `set_match`, `order_match` and `same_set`; per request `agreement` (of
the most probable next tokens: greedy acceptance on a given text); and, over all requests and layers of a method, set
match by `position` and by the target's router `margin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harness.jobs import model_columns, progress_bar, write_table
from harness.plan import compose
from harness.recordings import read_manifest
from harness.scales import Probe, load_probe
from specter.arguments import run_command
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.hub import with_local_paths
from specter.models.checkpoint import Checkpoint
from specter.probes.fidelity import DraftExperts, Study, Texts, order_match, set_match, study
from specter.prompts import first_texts, load_tokenizer
from specter.quantize.ggml_blocks import FORMATS, round_to_blocks
from specter.quantize.gptq_format import check_draft_origin, read_directory
from specter.quantize.layer import LayerExperts
from specter.quantize.rtn import quantize_rtn
from specter.recording import Recording

GROUP = 128
NUM_MARGIN_BINS = 10
READ_METHODS = ("gptq", "awq")  # from the directories that the rule `quantize` makes


@dataclass(frozen=True)
class Options:
    """One study: a model, a file of conf/probe, and values that replace some of that file's."""

    model: str  # a file of conf/model
    probe: str = "laptop"
    manifests: tuple[Path, ...] = ()  # of recordings, where texts=recorded
    out: Path = Path("results/adhoc/fidelity.parquet")
    threads: int = 1
    quantized: Path | None = None  # the model's draft, beside which the other methods' directories are
    methods: tuple[str, ...] | None = None
    texts: str | None = None
    samplings: tuple[str, ...] | None = None
    datasets: tuple[str, ...] | None = None
    num_requests: int | None = None
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    window: int | None = None
    device: str | None = None
    total_requests: int | None = None

    def study(self) -> Probe:
        """The probe with the given values."""
        probe = load_probe(self.probe)
        given: dict[str, Any] = {name: getattr(self, name, None) for name in vars(probe)}
        return replace(probe, **{name: value for name, value in given.items() if value is not None})


class Request(NamedTuple):
    """One text and its source."""

    mode: str  # the sampling that wrote it, or "data set"
    dataset: str
    tokens: list[int]


# -- texts -------------------------------------------------------------------------------------


def requests(run: RunConfig, probe: Probe, manifests: Sequence[Path]) -> list[Request]:
    """The texts of the study, in the order of their data sets.

    Raises:
        SpecterError: no text is longer than its prompt, or texts=recorded without manifests.
    """
    if probe.texts not in ("recorded", "datasets"):
        raise SpecterError(f"texts={probe.texts!r} is unknown", "use recorded or datasets")
    found = list(_recorded(probe, manifests) if probe.texts == "recorded" else _of_datasets(run, probe))
    cut = [one._replace(tokens=one.tokens[: probe.num_tokens]) for one in found]
    kept = [one for one in cut if len(one.tokens) > probe.prompt_tokens]
    if probe.total_requests is not None:
        kept = evenly(kept, probe.total_requests)
    if not kept:
        raise SpecterError(
            f"none of {len(found)} texts is longer than {probe.prompt_tokens} tokens",
            "give manifests=results/<scale>/manifests/main/<model>/<data set>.json,... of recorded runs, "
            "or texts=datasets with datasets=...",
        )
    return kept


def evenly(found: Sequence[Request], total: int) -> list[Request]:
    """The first requests of every data set, `total` in all if there are as many; a short data set gives all it has, and
    the others its missing share."""
    by_dataset: dict[str, list[Request]] = {}
    for one in found:
        by_dataset.setdefault(one.dataset, []).append(one)
    left, kept = total, list[Request]()
    shortest_first = sorted(by_dataset.values(), key=len)
    for index, mine in enumerate(shortest_first):
        share = -(-left // (len(shortest_first) - index))  # rounded up: no request is lost to the division
        kept += mine[:share]
        left -= len(mine[:share])
    return kept


def _recorded(probe: Probe, manifests: Sequence[Path]) -> Iterator[Request]:
    """Prompts with what plain decoding generated after them."""
    for path in manifests:
        files, _ = read_manifest(path)
        for sampling in probe.samplings:
            keys = sorted(key for key in files if key.k == 0 and key.sampling == sampling)
            for key in keys[: probe.num_requests]:
                recording = Recording.load(files[key][0])
                yield Request(sampling, path.stem, [*recording.prompt, *recording.tokens])


def _of_datasets(run: RunConfig, probe: Probe) -> Iterator[Request]:
    tokenizer = load_tokenizer(run)
    for name in probe.datasets:
        for text in first_texts(compose([f"dataset={name}"]).dataset, probe.num_requests):
            yield Request("data set", name, tokenizer.encode(text))


def side_by_side(found: Sequence[Request], prompt_tokens: int) -> Texts:
    """All texts as the rows of one tensor, padded with zeros."""
    tokens = [torch.tensor(one.tokens) for one in found]
    return Texts(pad_sequence(tokens, batch_first=True), torch.tensor([len(one) for one in tokens]), prompt_tokens)


# -- drafts ------------------------------------------------------------------------------------


def draft(method: str, quantized: Path, checkpoint: Checkpoint) -> DraftExperts:
    """The experts of one method; directories of methods are beside `quantized`.

    Raises:
        SpecterError: an unknown method, or a directory that is missing, damaged or made from another checkpoint.
    """
    if method in FORMATS:
        return lambda layer, target: _each(target, lambda w: round_to_blocks(w, method))
    if method == "rtn":
        return lambda layer, target: _each(target, lambda w: quantize_rtn(w, GROUP).dequantize())
    if method not in READ_METHODS:
        known = ", ".join([*READ_METHODS, "rtn", *FORMATS])
        raise SpecterError(f"method {method!r} is unknown", f"use methods of: {known}")
    directory = quantized.parent / method
    check_draft_origin(directory, checkpoint)
    experts = read_directory(directory, checkpoint.spec)

    def read(layer: int, target: LayerExperts) -> LayerExperts:
        device = target.gate.device
        gate, up, down = (
            part.layer(layer).to(device).dequantize() for part in (experts.gate, experts.up, experts.down)
        )
        if experts.input_scales is not None:
            scales = experts.input_scales[layer].to(device)
            gate, up = gate * scales, up * scales
        return LayerExperts(gate, up, down)

    return read


def _each(target: LayerExperts, code: Callable[[Tensor], Tensor]) -> LayerExperts:
    return LayerExperts(code(target.gate), code(target.up), code(target.down))


# -- rows --------------------------------------------------------------------------------------


def rows(result: Study, found: Sequence[Request], texts: Texts) -> pd.DataFrame:
    """The long table of all methods."""
    real = texts.is_real().numpy()
    frames = []
    for method, followed in result.drafts.items():
        match = set_match(followed.routing, result.target.routing).numpy()  # [N, P, layers]
        order = order_match(followed.routing, result.target.routing).numpy()
        agrees = (followed.choices == result.target.choices).numpy()
        of_requests = pd.concat(
            [
                _per_request("set_match", match, real),
                _per_request("order_match", order, real),
                _per_request("same_set", (match == 1).astype(np.float32), real),
                _per_request("agreement", agrees[..., None], real).assign(layer=-1),
            ]
        )
        for key in ("mode", "dataset"):
            of_requests[key] = [getattr(found[index], key) for index in of_requests["request"]]
        over_all = pd.concat([_by_position(match, real), _by_margin(match, result.margins, real)])
        frames.append(pd.concat([of_requests, over_all]).assign(method=method))
    frame = pd.concat(frames, ignore_index=True)
    numbers = {key: frame[key].fillna(-1).astype(int) for key in ("request", "layer", "position")}
    return frame.assign(**numbers, mode=frame["mode"].fillna("all"), dataset=frame["dataset"].fillna("all"))


def _per_request(quantity: str, values: NDArray[Any], real: NDArray[np.bool_]) -> pd.DataFrame:
    """Mean of `values` [N, P, layers] over each request's positions: a row per request and layer."""
    counts = real.sum(1)
    means = (values * real[..., None]).sum(1) / counts[:, None]  # [N, layers]
    request, layer = (index.ravel() for index in np.indices(means.shape))
    columns = {"request": request, "layer": layer, "value": means.ravel(), "num": counts[request]}
    return pd.DataFrame({"quantity": quantity, **columns})


def _by_position(match: NDArray[Any], real: NDArray[np.bool_]) -> pd.DataFrame:
    counts = real.sum(0)
    means = (match.mean(-1) * real).sum(0) / np.maximum(counts, 1)
    frame = pd.DataFrame({"quantity": "position", "position": np.arange(len(means)), "value": means, "num": counts})
    return frame[frame["num"] > 0]


def _by_margin(match: NDArray[Any], margins: Tensor, real: NDArray[np.bool_]) -> pd.DataFrame:
    """Equally filled bins of the target's margin between the last chosen expert and the first one not chosen."""
    frame = pd.DataFrame({"margin": margins.numpy()[real].ravel(), "value": match[real].ravel()})
    bins = frame["margin"].rank(method="first", pct=True).mul(NUM_MARGIN_BINS).apply(np.ceil)
    means = frame.groupby(bins).agg(margin=("margin", "median"), value=("value", "mean"), num=("value", "size"))
    return means.reset_index(drop=True).assign(quantity="margin")


def measure(options: Options) -> pd.DataFrame:
    """Runs the study. Raises SpecterError for bad input, before large work."""
    torch.set_num_threads(options.threads)
    probe = options.study()
    if probe.device == "cuda" and not torch.cuda.is_available():
        raise SpecterError("device=cuda, but there is no CUDA GPU", "use device=cpu")
    run = compose([f"model={options.model}"])
    run.model.quantized = str(options.quantized or run.model.quantized)
    run = with_local_paths(run, Console(stderr=True))
    model = run.model
    found = requests(run, probe, options.manifests)
    texts = side_by_side(found, probe.prompt_tokens)
    checkpoint = Checkpoint.open(model.checkpoint)
    spec = checkpoint.spec
    if int(texts.tokens.max()) >= spec.vocab:
        raise SpecterError(
            f"token {int(texts.tokens.max())} is beyond the vocabulary of {spec.vocab} of {spec.name}",
            "use the model's own tokenizer, and recordings of this model",
        )
    drafts = {method: draft(method, Path(model.quantized), checkpoint) for method in probe.methods}
    with progress_bar() as progress, torch.inference_mode():
        task = progress.add_task(f"fidelity {model.name}", total=spec.num_layers)
        result = study(checkpoint, drafts, texts, probe.window, probe.device, lambda: progress.advance(task))
    num_pairs = len(found) * spec.num_moe_layers
    counts = {"num_requests": len(found), "num_pairs": num_pairs, "window": probe.window}
    return rows(result, found, texts).assign(**model_columns(model), **counts)


def main(options: Options) -> None:
    frame = measure(options)
    write_table(options.out, frame)
    means = frame.groupby(["method", "quantity"])["value"].mean().unstack()
    pairs = f"{frame['num_requests'].iloc[0]} requests, {frame['num_pairs'].iloc[0]} request-layer pairs"
    print(f"{options.model}: {pairs}\n{means[['set_match', 'order_match', 'agreement']].to_string()}")


if __name__ == "__main__":
    run_command(main, Options)
