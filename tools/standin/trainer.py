"""The training loop of a stand-in: a step is one captured CUDA graph on a GPU, eager on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from tools.standin import network
from tools.standin.network import ROUTED, Network, Weights, noisy_experts, working_copy


@dataclass(frozen=True)
class TrainSettings:
    """All choices of one training run; written into training.json."""

    seconds: float = 190.0  # wall time of the loop
    batch: int = 40
    length: int = 768
    peak_lr: float = 4e-3
    final_lr: float = 4e-5
    warmup_frac: float = 0.02
    weight_decay: float = 0.1
    balance_weight: float = 0.003
    near_tie_weight: float = 0.0  # of network.near_tie_loss
    # Two measures that bring the INT4 copy's agreement to the level of a large model: after every step, routed experts'
    # rows are clipped to `expert_clip` times their RMS (Gaussian rows reach 2.6); in the last `consistency_frac` of the
    # run, a second pass with noise of one INT4 step on the experts is trained to predict the same.
    expert_clip: float = 1.9
    consistency_frac: float = 0.35
    consistency_weight: float = 4.0
    clip_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class StepVariant:
    """Execution of a step; all variants compute the same function."""

    grouped: bool
    compiled: bool
    graph: bool

    def __str__(self) -> str:
        parts = ["grouped" if self.grouped else "dense", "compiled" if self.compiled else "eager"]
        return "+".join(parts + ["graph"] * self.graph)


CPU_VARIANT = StepVariant(grouped=False, compiled=False, graph=False)
GPU_VARIANTS = (
    StepVariant(grouped=True, compiled=True, graph=True),
    StepVariant(grouped=False, compiled=True, graph=True),
    StepVariant(grouped=True, compiled=False, graph=True),
)


@dataclass(frozen=True)
class LossPoint:
    """Mean losses since the previous point; consistency is 0 before its phase."""

    step: int
    seconds: float
    lr: float
    loss: float
    balance: float
    consistency: float
    near_ties: float


class Trainer:
    """fp32 master weights, AdamW, gradient clipping; `step` trains on one batch.

    The learning rate is a device scalar, so a captured step follows it. `start`: weights to continue from.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: TrainSettings,
        device: str,
        variant: StepVariant,
        start: Weights | None = None,
    ) -> None:
        self.spec, self.settings, self.device = spec, settings, device
        first = network.init_weights(spec, settings.seed, device) if start is None else start
        self.weights: Weights = {name: weight.to(device, copy=True).requires_grad_() for name, weight in first.items()}
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        experts = network.experts_grouped if variant.grouped else network.experts_dense
        self._network = Network(spec, settings.length, device, experts, variant.compiled)
        self.lr = torch.tensor(0.0, device=device)
        self._batch = torch.zeros(settings.batch, settings.length + 1, dtype=torch.int64, device=device)
        self._losses = torch.zeros(4, device=device)  # sums since the last read, in the order of `read_losses`
        plain = ("embed", "head")
        decays = {name: not (name.endswith("bias") or "norm" in name or name in plain) for name in self.weights}
        decayed = [weight for name, weight in self.weights.items() if decays[name]]
        others = [weight for name, weight in self.weights.items() if not decays[name]]
        on_gpu = device == "cuda"
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.lr,
            betas=(0.9, 0.95),
            fused=True if on_gpu else None,
            capturable=on_gpu,
        )
        runs: list[Callable[[], None]] = [partial(self._run_step, consistent) for consistent in (False, True)]
        self._runs = [self._capture(run) for run in runs] if variant.graph else runs

    def reset(self) -> None:
        """Zeroes the optimizer's moments and step count, the only effect of steps at learning rate 0."""
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._losses.zero_()

    def step(self, batch: Tensor, consistent: bool = False) -> None:
        """One update on token ids int64 [B, T + 1], with or without the noisy pass; asynchronous on a GPU."""
        self._batch.copy_(batch)
        self._runs[consistent]()

    def read_losses(self, num_steps: int) -> list[float]:
        """Mean cross-entropy, balance, consistency and near ties over the `num_steps` steps since the last read;
        synchronises."""
        means: list[float] = (self._losses / num_steps).tolist()
        self._losses.zero_()
        return means

    def _run_step(self, consistent: bool) -> None:
        run, tokens, targets = self._network, self._batch[:, :-1], self._batch[:, 1:]
        work = working_copy(self.weights, self.dtype)
        head, bias = work["head"], work.get("head_bias")
        if consistent:
            noisy = work | noisy_experts(self.weights, self.dtype)
            out, noisy_out = run(work, tokens), run(noisy, tokens)
            cross_entropy, consistency = run.head_losses(out.x, noisy_out.x, head, bias, targets)
        else:
            out = run(work, tokens)
            cross_entropy = run.head_loss(out.x, head, bias, targets)
            consistency = torch.zeros_like(cross_entropy)
        self._update(cross_entropy, out.balance, consistency, out.near_ties)

    def _update(self, cross_entropy: Tensor, balance: Tensor, consistency: Tensor, near_ties: Tensor) -> None:
        settings = self.settings
        self._optimizer.zero_grad(set_to_none=True)
        robustness = settings.consistency_weight * consistency + settings.near_tie_weight * near_ties
        (cross_entropy + settings.balance_weight * balance + robustness).backward()
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), settings.clip_norm, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            for name in ROUTED:
                weight = self.weights[name]
                limit = settings.expert_clip * weight.square().mean(-1, keepdim=True).sqrt()
                weight.copy_(weight.clamp(-limit, limit))
        self._losses += torch.stack((cross_entropy, balance, consistency, near_ties)).detach()

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        # Warm-up steps at learning rate 0 compile kernels and create the optimizer's state; weights do not move.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._batch.random_(self.spec.vocab)
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        self._optimizer.zero_grad(set_to_none=True)  # gradients stay in the graph's memory
        self.reset()
        return graph.replay


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """Linear warm-up, then cosine decay; progress 0 … 1 is the elapsed share of the time."""
    if progress < settings.warmup_frac:
        return settings.peak_lr * (progress + 0.02 * settings.warmup_frac) / (1.02 * settings.warmup_frac)
    share = min((progress - settings.warmup_frac) / (1 - settings.warmup_frac), 1.0)
    return settings.final_lr + 0.5 * (settings.peak_lr - settings.final_lr) * (1 + math.cos(math.pi * share))


def random_batch(tokens: Tensor, settings: TrainSettings, generator: torch.Generator) -> Tensor:
    """int64 [B, T + 1] cut from random places of uint16-valued tokens (int32 [N] on the device)."""
    starts = torch.randint(
        len(tokens) - settings.length - 1, (settings.batch, 1), generator=generator, device=tokens.device
    )
    return tokens[starts + torch.arange(settings.length + 1, device=tokens.device)].long()


def time_variant(trainer: Trainer, tokens: Tensor, num_steps: int = 10) -> float:
    """Mean ms of a plain step over `num_steps` after two warm-up steps; the trainer is reset."""
    generator = torch.Generator(device=tokens.device).manual_seed(1)
    batch = random_batch(tokens, trainer.settings, generator)
    for _ in range(2):
        trainer.step(batch)
    trainer.read_losses(2)
    start = time.perf_counter()
    for _ in range(num_steps):
        trainer.step(batch)
    loss, *_ = trainer.read_losses(num_steps)
    if not math.isfinite(loss):
        raise SpecterError(f"a training step gave the loss {loss}", "use another step variant")
    step_ms = (time.perf_counter() - start) * 1000 / num_steps
    trainer.reset()
    return step_ms


def train(
    trainer: Trainer,
    tokens: Tensor,
    check: Callable[[Trainer, float], None],
    report: Callable[[LossPoint], None],
    max_steps: int | None = None,
    sync_every: int = 20,
    report_every: int = 200,
) -> int:
    """Trains for the settings' time (or `max_steps`); returns the number of steps.

    Args:
        tokens: int32 [N] on the trainer's device.
        check: called every tenth of the time with the progress.
        report: receives a loss point about every `report_every` steps.

    Raises SpecterError: the loss is not finite.
    """
    settings = trainer.settings
    generator = torch.Generator(device=tokens.device).manual_seed(settings.seed + 1)
    start = time.perf_counter()
    step = reported = 0
    next_check, progress = 0.1, 0.0
    while progress < 1.0:
        trainer.lr.fill_(learning_rate(settings, progress))
        trainer.step(random_batch(tokens, settings, generator), consistent=progress >= 1 - settings.consistency_frac)
        step += 1
        if trainer.device == "cuda" and step % sync_every == 0:
            torch.cuda.synchronize()  # the schedule follows the clock
        elapsed = time.perf_counter() - start
        progress = elapsed / settings.seconds if max_steps is None else step / max_steps
        if step % report_every == 0 or progress >= 1.0:
            loss, *others = trainer.read_losses(step - reported)
            if not math.isfinite(loss):
                raise SpecterError(f"the loss became {loss} at step {step}", "train with a lower peak_lr")
            means = (round(mean, 5) for mean in (loss, *others))
            report(LossPoint(step, round(elapsed, 1), float(trainer.lr), *means))
            reported = step
        if progress >= next_check:
            check(trainer, progress)
            next_check += 0.1
    return step
