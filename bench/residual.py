"""`python -m bench residual`: encoder, Triton decoder and delivery over the link of one full-size model on this GPU.

The model is an inflated stand-in. Its codes are those of its INT4 directory (`codes=gptq`), or round-to-nearest codes
of the inflated weights (`codes=rtn`, `codes=rtn_asym`). Every encoded blob is decoded and compared bit for bit.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.report import Report, Row, run_section
from specter import provenance
from specter.calibrate.residual_inputs import LayerData, Source, Timed
from specter.codecs.residual.decode import check_layer
from specter.codecs.residual.encode import Encoded, encode_layer
from specter.codecs.residual.resident import layout_of
from specter.errors import SpecterError
from specter.kernels.pinned_io import pinned_zeros
from specter.models.spec import ExpertId
from specter.quantize.residual.convert import layer_report, summary
from specter.quantize.residual.directory import expert_name
from specter.sample import Sample, host_ms

GOAL_DECODE_US, GOAL_GB_PER_S, GOAL_ENCODE_S = 20.0, 105.0, 60.0  # DeepSeek-V2-Lite on an H200
PER_LAUNCH = (1, 2, 4, 8, 16, 32)
VARIANTS = tuple(itertools.product((2, 4, 8, 16), (64, 72, 80)))  # segments a program, registers
NUM_STAGES = 4  # staging buffers of the pipelined delivery
NUM_TIMED = 32  # different experts in rotation


@dataclass(frozen=True)
class Options:
    """Encoder, decoder and delivery of residual experts."""

    model: str = "deepseek_v2_lite"  # full size
    checkpoint: Path | None = None  # its stand-in; by default data/standins/MODEL
    codes: str = "gptq"  # or rtn, rtn_asym
    quantized: Path | None = None  # INT4 directory of the stand-in; by default results/quantized/MODEL/gptq
    layers: int = 0  # MoE layers to encode; 0: all
    seconds: float = 0  # no layer is begun after this time; 0: no limit. Totals are then extrapolated
    out: Path = Path("results/bench/residual.json")
    commit: str = ""  # of the code, where there is no git


class ResidualBench:
    """Sections in order: `encode` leaves the experts that the others decode."""

    def __init__(self, source: Source, report: Report, device: torch.device) -> None:
        self.source = source
        self.report = report
        self.device = device
        self.kept: list[tuple[LayerData, Encoded]] = []  # with NUM_TIMED experts in all

    def encode(self, num_layers: int, limit_s: float) -> None:
        """Encodes, checks, decodes and compares layer by layer."""
        begin, spec = time.perf_counter(), self.source.spec
        layers: list[dict[str, Any]] = []
        seconds: list[float] = []
        check_s, peak_bytes, is_equal = 0.0, 0, True
        for layer in range(num_layers):
            if limit_s and layers and time.perf_counter() - begin > limit_s:
                break
            data = self.source.layer(layer)
            base = self._reset_peak()
            start = time.perf_counter()
            encoded = encode_layer(data.weights, data.codes)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated(self.device) - base)
            start = time.perf_counter()
            self._check(layer, data, encoded)
            check_s += time.perf_counter() - start
            is_equal &= self._is_equal(data, encoded)
            layers.append(layer_report(encoded, layout_of(data.codes)))
            if sum(kept.num_experts for kept, _ in self.kept) < NUM_TIMED:
                self.kept.append((data, encoded))
        share = spec.num_moe_layers / len(layers)
        total = Sample((sum(seconds) * share,))
        note = "all layers" if share == 1 else f"EXTRAPOLATED from {len(layers)} layers"
        self.report.add(Row("encode the model", "s", total, goal=GOAL_ENCODE_S, note=note))
        first = seconds[1:] or seconds  # the first layer compiles and warms up
        raw_gb = 2 * layers[0]["num_weights"] / 1e9
        rates = Sample(tuple(raw_gb / one for one in first))
        self.report.add(Row("encode, bf16 read", "GB/s", rates, is_rate=True, note="a layer at a time"))
        self.report.facts |= {
            "layers": layers,
            "encoded": summary(layers),
            "num_layers": len(layers),
            "check_s_per_layer": check_s / len(layers),
            "encode_peak_gb_beside_input": peak_bytes / 1e9,
        }
        self.report.summary |= {
            "bits_per_weight": summary(layers)["bits_per_weight"],
            "encode_s": total.median,
            "encode_peak_gb": peak_bytes / 1e9,
            "bit_equal": is_equal,
            "experts_compared": spec.num_experts * len(layers),
        }

    def decode(self) -> None:
        """us per expert by experts a launch, and by the kernel's free choices."""
        timed = self._timed()
        num_weights = timed.decoder.layout.num_weights
        for count in (count for count in PER_LAUNCH if count <= timed.num_experts):
            sample = timed.decode_us(timed.decoder, count)
            goal = GOAL_DECODE_US if count >= 16 else None
            rate = 2 * num_weights / sample.median / 1e3
            self.report.add(
                Row(f"decode, {count} a launch", "us/expert", sample, goal=goal, note=f"{rate:.0f} GB/s out")
            )
            self.report.summary[f"decode_us_{count}"] = sample.median
        tuned = {}
        for segments, registers in VARIANTS:
            variant = replace(timed.decoder, segments=segments, max_registers=registers)
            for count in {1, timed.num_experts}:
                name = f"{segments} segments, {registers} registers, {count} a launch"
                tuned[name] = timed.decode_us(variant, count).median
        self.report.facts["decode_us by kernel choices"] = tuned

    def deliver(self) -> None:
        """Experts from page-locked host memory: raw, as blobs, and as blobs decoded behind the copies."""
        timed = self._timed()
        num_experts, decoder = timed.num_experts, timed.decoder
        host = [pinned_zeros((blob.nbytes,), torch.uint8, self.device).copy_(blob) for blob in timed.blobs]
        expert_bytes = 2 * decoder.layout.num_weights
        raw = [pinned_zeros((expert_bytes,), torch.uint8, self.device) for _ in range(8)]
        pipeline = Pipeline(
            torch.zeros(NUM_STAGES, 4 * decoder.layout.raw_words, dtype=torch.uint8, device=self.device)
        )
        waves = [timed.wave([index], [index % NUM_STAGES], index) for index in range(num_experts)]

        def deliver() -> None:
            pipeline.deliver(host, lambda index, stages: timed.launch(decoder, waves[index], stages))

        blob_bytes = sum(blob.nbytes for blob in host) / num_experts
        ways: dict[str, tuple[Callable[[], None], float]] = {
            "copy raw bf16": (lambda: pipeline.copy([raw[i % 8] for i in range(num_experts)]), expert_bytes),
            "copy blobs": (lambda: pipeline.copy(host), blob_bytes),
            "copy and decode blobs": (deliver, blob_bytes),
        }
        for name, (run, link_bytes) in ways.items():
            ms = host_ms(run, repeats=7)
            us = Sample(tuple(1e3 * value / num_experts for value in ms.values))
            rates = Sample(tuple(expert_bytes / value / 1e3 for value in us.values))
            goal = GOAL_GB_PER_S if name == "copy and decode blobs" else None
            note = f"{us.median:.1f} us/expert, link {link_bytes / us.median / 1e3:.1f} GB/s"
            self.report.add(Row(f"{name}, bf16 delivered", "GB/s", rates, goal=goal, is_rate=True, note=note))
        self.report.summary["delivered_gb_per_s"] = rates.median
        timed.places.zero_()
        deliver()
        torch.cuda.synchronize()
        self.report.summary["delivered_bit_equal"] = timed.is_equal()

    def _reset_peak(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _check(self, layer: int, data: LayerData, encoded: Encoded) -> None:
        names = [expert_name(ExpertId(layer, expert)) for expert in range(data.num_experts)]
        check_layer(encoded.blobs, data.codes, names)

    def _is_equal(self, data: LayerData, encoded: Encoded) -> bool:
        timed = Timed.of([(data, encoded)], data.num_experts)
        experts = range(data.num_experts)
        timed.launch(timed.decoder, timed.wave(experts, experts, 0), timed.slots)
        return timed.is_equal()

    def _timed(self) -> Timed:
        """NUM_TIMED experts as one layer, all with the first layer's windows."""
        windows = self.kept[0][1].windows
        for index, (data, encoded) in enumerate(self.kept):
            if encoded.windows != windows:
                self.kept[index] = data, encode_layer(data.weights, data.codes, windows)
        return Timed.of(self.kept, NUM_TIMED)


class Pipeline:
    """Copies through a few staging buffers on one stream, decodes on another."""

    def __init__(self, stages: Tensor) -> None:
        self._stages = stages
        self._link, self._compute = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(self, payloads: list[Tensor]) -> None:
        with torch.cuda.stream(self._link):
            for index, payload in enumerate(payloads):
                self._stages[index % len(self._stages), : len(payload)].copy_(payload, non_blocking=True)

    def deliver(self, payloads: list[Tensor], decode: Callable[[int, Tensor], None]) -> None:
        """Payload i goes to stage i modulo their number, and `decode(i, stages)` follows."""
        free: list[torch.cuda.Event | None] = [None] * len(self._stages)
        for index, payload in enumerate(payloads):
            stage = index % len(self._stages)
            with torch.cuda.stream(self._link):
                if (event := free[stage]) is not None:
                    self._link.wait_event(event)
                self._stages[stage, : len(payload)].copy_(payload, non_blocking=True)
                arrived = self._link.record_event()
            with torch.cuda.stream(self._compute):
                self._compute.wait_event(arrived)
                decode(index, self._stages)
                free[stage] = self._compute.record_event()


def run(options: Options, device: torch.device, console: Console) -> Report:
    """Raises SpecterError for bad input, before large work."""
    source = Source(options.model, options.checkpoint, options.codes, options.quantized, device)
    inputs = {"model": options.model, "codes": options.codes, "checkpoint_sha256": source.narrow.digest()}
    report = Report(options.out, provenance.of_device(device, options.commit, **inputs))
    bench = ResidualBench(source, report, device)
    num_layers = min(options.layers or source.spec.num_moe_layers, source.spec.num_moe_layers)
    sections: dict[str, Callable[[], None]] = {
        "encode": lambda: bench.encode(num_layers, options.seconds),
        "decode": bench.decode,
        "deliver": bench.deliver,
    }
    for name, section in sections.items():
        run_section(name, section, report, console)
    return report


def main(options: Options) -> None:
    """Exits with 1 if a section failed. Raises SpecterError for bad input."""
    if not torch.cuda.is_available():
        raise SpecterError("no CUDA device", "run this bench on a machine with a GPU")
    console = Console(width=160)
    report = run(options, torch.device("cuda"), console)
    shown: dict[str, Any] = {key: value for key, value in report.facts.items() if key != "layers"}
    replace(report, facts=shown).show(console)
    if report.skipped:
        sys.exit(1)
