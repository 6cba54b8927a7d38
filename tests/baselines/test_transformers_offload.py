"""The transformers library with offload: where its modules run, and that it yields our decoder's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baselines.transformers_offload import KINDS, Options, measure, offload
from specter.errors import SpecterError
from tests.helpers import open_live, run_pass, write_random

PROMPT = [5, 17, 3]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_random(directory)
    return directory


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_offload_yields_the_decoders_tokens(checkpoint: Path, device: str) -> None:
    live = open_live(checkpoint)
    expected, prompt = [], list(PROMPT)
    for _ in range(3):
        live.decoder.reset()
        expected.append(int(run_pass(live.decoder, live.store, prompt, 0, 1).outputs[0].argmax()))
        prompt.append(expected[-1])
    rows = measure(Options(checkpoint, Path("unused"), device, num_tokens=3), PROMPT, lambda text: None)
    assert [row["system"] for row in rows] == [f"transformers, {kind}" for kind in KINDS]
    assert [row["tokens"] for row in rows] == [expected] * 3


class FakeModel:
    def to(self, device: str) -> str:
        return f"all on {device}"


def test_modules_run_on_the_given_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import accelerate

    monkeypatch.setattr(accelerate, "cpu_offload", lambda model, execution_device: ("cpu", execution_device))
    monkeypatch.setattr(
        accelerate, "disk_offload", lambda model, scratch, execution_device: (scratch, execution_device)
    )
    cuda = torch.device("cuda")
    assert offload(FakeModel(), "resident", "cuda", tmp_path) == "all on cuda"
    assert offload(FakeModel(), "cpu_offload", "cuda", tmp_path) == ("cpu", cuda)
    assert offload(FakeModel(), "disk_offload", "cuda", tmp_path) == (str(tmp_path), cuda)
    with pytest.raises(SpecterError, match="offload 'nvme' is unknown"):
        offload(FakeModel(), "nvme", "cuda", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cuda"}, "device=cuda is not available"), ({"dtype": "int3"}, "dtype=int3 is unknown")],
)
def test_an_unknown_device_or_type_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecterError, match=message):
        measure(Options(Path("nowhere"), Path("unused"), **options), PROMPT)  # type: ignore[arg-type]
