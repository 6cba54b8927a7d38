"""`python -m tools.standin.train model=deepseek_v2_lite`: trains a stand-in and measures it."""

from __future__ import annotations

import dataclasses
import gc
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baselines.transformers_offload import load_eager
from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import read_object, write_json
from specter.models.checkpoint import Checkpoint
from specter.models.spec import ModelSpec
from specter.quantize.calibration import TOKENIZER
from tools.standin.checkpoint import load_standin, save_standin
from tools.standin.corpus import ROOT, TOKENS, build_corpus, load_tokens
from tools.standin.network import Network, Weights
from tools.standin.quality import QualityMeter, load_summary
from tools.standin.specs import NARROW
from tools.standin.trainer import CPU_VARIANT, GPU_VARIANTS, LossPoint, Trainer, TrainSettings, time_variant, train

# The paper's acceptance (mean of its models) and GPTQ expert match of the real checkpoints.
PUBLISHED = {
    "deepseek_v2": {"acceptance_mean": 0.966, "acceptance_deepseek": 0.99, "match_mean": 0.963},
    "qwen2_moe": {"acceptance_mean": 0.966, "match_mean": 0.908},
    "phimoe": {"acceptance_mean": 0.966, "match_mean": 0.965},
}
SAMPLE_PROMPTS = (
    "The history of the town began when the first settlers",
    "def parse_arguments(argv):\n    ",
    "Question: What does the kernel do when a process runs out of memory?\nAnswer:",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes config.json, model.safetensors (int8-coded) and training.json. Builds the corpus if it is missing."""

    model: str = "deepseek_v2_lite"  # or qwen1_5_moe, phi3_5_moe
    seconds: float = TrainSettings.seconds  # of the training loop
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    data: Path = TOKENS
    out: str = ""  # checkpoint directory; empty: data/standins/MODEL
    peak_lr: float = TrainSettings.peak_lr
    seed: int = TrainSettings.seed
    near_tie_weight: float = TrainSettings.near_tie_weight  # sparsemixer only
    consistency_frac: float = TrainSettings.consistency_frac
    consistency_weight: float = TrainSettings.consistency_weight
    start: str = ""  # checkpoint directory to continue from; empty: from random weights
    batch: int = TrainSettings.batch
    length: int = TrainSettings.length
    steps: int = 0  # 0: train for `seconds`
    variant: str = ""  # of the step, for example grouped+compiled+graph; empty: try all and take the fastest

    def check(self) -> None:
        """Raises SpecterError for an unknown model."""
        if self.model not in NARROW:
            raise SpecterError(f"unknown model {self.model!r}", f"use one of {', '.join(NARROW)}")


def pick_variant(
    spec: ModelSpec, settings: TrainSettings, device: str, tokens: Tensor, wanted: str, start: Weights | None
) -> tuple[Trainer, dict[str, float | str]]:
    """A trainer with the fastest step variant, and each variant's ms per step or error."""
    if device != "cuda":
        return Trainer(spec, settings, device, CPU_VARIANT, start), {}
    timings: dict[str, float | str] = {}
    best: tuple[float, Trainer] | None = None
    for variant in (variant for variant in GPU_VARIANTS if wanted in ("", str(variant))):
        began = time.perf_counter()
        try:
            trainer = Trainer(spec, settings, device, variant, start)
            step_ms = time_variant(trainer, tokens)
        except (RuntimeError, AttributeError, SpecterError) as error:  # not supported by this GPU or torch
            timings[str(variant)] = f"failed: {str(error)[:300]}"
            print(variant, timings[str(variant)], flush=True)
            continue
        timings[str(variant)] = round(step_ms, 2)
        peak = torch.cuda.max_memory_allocated() / 2**30
        built_s = time.perf_counter() - began
        print(f"{variant}: {step_ms:.1f} ms/step, {built_s:.0f} s to build and try, {peak:.1f} GiB", flush=True)
        if best is None or step_ms < best[0]:
            best = (step_ms, trainer)
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    if best is None:
        raise SpecterError(f"no step variant {wanted} runs on {device}: {timings}", "train with device=cpu")
    return best[1], timings


def transformers_difference(weights: Weights, folder: Path, tokens: Tensor) -> float:
    """Largest fp32 logit difference to transformers' model, relative to the largest logit."""
    checkpoint = Checkpoint.open(folder)
    with torch.no_grad():
        expected = load_eager(checkpoint, "cpu", torch.float32)(tokens).logits
        actual, _ = Network(checkpoint.spec, tokens.shape[1], "cpu").logits(weights, tokens)
    return float((expected - actual).abs().max() / expected.abs().max())


def measure(weights: Weights, spec: ModelSpec, valid: Tensor, device: str, scale: int = 24) -> dict[str, Any]:
    """All quality numbers of a checkpoint on held-out tokens int32 [N]; `scale` sequences per measurement."""
    meter = QualityMeter(spec, weights, 513, device)
    places = torch.linspace(0, len(valid) - 520, scale * 8).long()
    windows = torch.stack([valid[place : place + 513] for place in places.tolist()]).long()
    loss, load = meter.loss_and_load(list(windows.split(scale)))
    prompts = windows[::8, :32]
    result: dict[str, Any] = {
        "valid_loss": round(loss, 4),
        "load": load_summary(load),
        "int4": "symmetric round-to-nearest of the routed experts, one group per row",
        "teacher_forced": meter.teacher_forced(windows[::8, :512]),
        "published": PUBLISHED[spec.family],
    }
    for name, temperature in (("greedy", 0.0), ("seeded_0.7", 0.7), ("seeded_1.0", 1.0)):
        _, result[name] = meter.generated(prompts, 128 if scale > 4 else 8, temperature, seed=1)
        print(name, result[name], flush=True)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if tokenizer.get_vocab_size() == spec.vocab:
        result["samples"] = []
        for text in SAMPLE_PROMPTS:
            prompt = torch.tensor([tokenizer.encode(text).ids], device=device)
            tokens, _ = meter.generated(prompt, 96 if scale > 4 else 8, 0.7, seed=2)
            result["samples"].append(tokenizer.decode(tokens[0].tolist()))
    return result


def _earlier(start: Path) -> dict[str, Any]:
    """The training of the checkpoint that is continued."""
    kept = ("settings", "train_seconds", "num_steps", "num_tokens_seen", "loss_curve", "continues")
    earlier = read_object(start / "training.json", "keep the checkpoint's training.json beside it")
    return {key: earlier[key] for key in kept if key in earlier}


def run(options: Options) -> None:
    options.check()
    spec = NARROW[options.model]
    out = Path(options.out) if options.out else ROOT / "data" / "standins" / options.model
    given = {key: value for key, value in vars(options).items() if hasattr(TrainSettings, key)}
    settings = dataclasses.replace(TrainSettings(), **given)
    first = load_standin(spec, Path(options.start)) if options.start else None
    if options.data == TOKENS and not TOKENS.is_file():
        print("building the corpus and the tokenizer first", flush=True)
        build_corpus()
    arrays = load_tokens(options.data)
    corpus = read_object(
        options.data.parent / "corpus.json", "keep corpus.json, which names the text's sources, beside the tokens"
    )
    tokens = {name: torch.from_numpy(values.astype("int32")).to(options.device) for name, values in arrays.items()}
    print({name: len(values) for name, values in tokens.items()}, flush=True)
    trainer, timings = pick_variant(spec, settings, options.device, tokens["train"], options.variant, first)
    curve: list[LossPoint] = []
    agreements: list[dict[str, float]] = []
    calibration = tokens["train"][: 16 * 512].view(16, 512).long()

    def check(trainer: Trainer, progress: float) -> None:
        agreement = QualityMeter(spec, trainer.weights, 512, options.device).teacher_forced(calibration)
        agreements.append({"progress": round(progress, 2), **agreement})
        print(agreements[-1], flush=True)
        if progress > 0.45:
            save_standin(trainer.weights, spec, out)

    def report(point: LossPoint) -> None:
        curve.append(point)
        print(point, flush=True)

    start = time.perf_counter()
    num_steps = train(trainer, tokens["train"], check, report, max_steps=options.steps or None)
    train_s = round(time.perf_counter() - start, 1)
    save_standin(trainer.weights, spec, out)
    record: dict[str, Any] = {
        "trained": True,
        "model": spec.name,
        "num_params": sum(weight.numel() for weight in trainer.weights.values()),
        "hardware": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "settings": dataclasses.asdict(settings),
        "step_ms": timings,
        "train_seconds": train_s,
        "num_steps": num_steps,
        "num_tokens_seen": num_steps * settings.batch * settings.length,
        "loss_curve": [dataclasses.asdict(point) for point in curve],
        "int4_agreement_while_training": agreements,
        "corpus": corpus,
        "continues": _earlier(Path(options.start)) if options.start else None,
    }
    write_json(out / "training.json", record)
    weights = load_standin(spec, out)
    few = tokens["valid"][:128].view(2, 64).long().cpu()
    record["transformers_max_rel_diff"] = transformers_difference(weights, out, few)
    record |= measure(weights, spec, tokens["valid"], options.device, scale=2 if options.steps else 24)
    write_json(out / "training.json", record)
    shown = ("num_steps", "transformers_max_rel_diff", "valid_loss", "load", "teacher_forced", "samples")
    print(json.dumps({key: record.get(key) for key in shown}, indent=1))


if __name__ == "__main__":
    run_command(run, Options)
