"""The whole of `python -m specter.calibrate` on a machine of known rates, which stands in for the GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from specter.calibrate import rates
from specter.calibrate.__main__ import Options, calibrate, run_config
from specter.config import ModelConfig
from specter.errors import SpecterError
from specter.models.full_size import FULL_SIZE
from specter.sample import Sample
from specter.timeline.costs import DECODE_INT_OPS, CostModel
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.calibrate.test_profile import MACHINE, once
from tests.helpers import CONF

MODEL = load_typed(ModelConfig, CONF / "model" / "deepseek_v2_lite.yaml")
SPEC = replace(FULL_SIZE["deepseek_v2_lite"], num_layers=rates.NUM_LAYERS)
COSTS = CostModel(SPEC, 16, 256)


def graph_ms(num_kernels: int) -> Sample:
    return once((MACHINE.graph_ns + num_kernels * MACHINE.kernel_ns) / 1e6)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, MACHINE.device_memory_bytes))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    copies = {size: once(MACHINE.copy_ns(size) / 1e6) for size in rates.LINK_BYTES}
    monkeypatch.setattr(rates, "copies", lambda device: {"to the device": copies, "to the host": copies})
    alone = {
        "device copy": once(2 * rates.HBM_BYTES / MACHINE.hbm_bytes_per_s * 1e3),
        "product": once(2 * rates.FLOPS_SIZE**3 / MACHINE.bf16_flops * 1e3),
        "graph of one kernel": graph_ms(1),
        "graph of many": graph_ms(rates.NUM_KERNELS),
    }
    monkeypatch.setattr(rates, "device_alone", lambda device: alone)
    host = {"copy": once(MACHINE.launch_ns / 1e3), "issue": once(MACHINE.issue_ns / 1e3), "read": once(1.0)}
    monkeypatch.setattr(rates, "host_calls", lambda device: host)
    us = DECODE_INT_OPS * SPEC.expert_params / MACHINE.int_ops * 1e6
    monkeypatch.setattr(rates, "decode_us", lambda config, device: {"us": once(us), "weights": SPEC.expert_params})

    class Runtime(rates.RuntimeRates):
        @classmethod
        def load(cls, config: Any, console: Any) -> Runtime:
            return cls(SimpleNamespace(spec=SPEC), None)  # type: ignore[arg-type]

        def graphs(self) -> dict[str, Sample]:
            waves = {count: once(MACHINE.compute_ns(COSTS.experts(count)) / 1e6) for count in rates.WAVE_EXPERTS}
            return {f"wave {count}": sample for count, sample in waves.items()}

        def plain(self, config: Any, hardware: Hardware) -> dict[str, float]:
            assert hardware.sync_ns == 0 and hardware.wave_ns == pytest.approx(MACHINE.wave_ns, abs=100)
            return {"measured": 1.0 + 3 * MACHINE.sync_ns / 1e6, "charged": 1.0}

    monkeypatch.setattr(rates, "RuntimeRates", Runtime)


def test_the_profile_is_the_machine() -> None:
    found, samples = calibrate(run_config(MODEL, 64), Options(name="mine"), Console(quiet=True))
    assert (found.name, found.title) == ("mine", "A GPU")
    for field in fields(Hardware):
        if isinstance(true := getattr(MACHINE, field.name), int):
            assert getattr(found, field.name) == pytest.approx(true, rel=0.01), field.name
    assert {"link, ms by bytes", "device, ms", "host, us", "graphs, ms", "seconds"} <= samples.keys()
    assert rates.as_json(samples)["host, us"]["copy"]["median"] == MACHINE.launch_ns / 1e3


def test_a_link_that_no_line_explains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "copies", lambda device: {"to the device": {10**6: once(1.0)}})
    with pytest.raises(SpecterError, match="no line"):
        calibrate(run_config(MODEL, 64), Options(), Console(quiet=True))
