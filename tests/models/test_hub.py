"""Checkpoints as a user has them: written by transformers, sharded, in any float type; and damaged ones."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import save_file

from specter import hub
from specter.errors import SpecterError
from specter.experts.store import ExpertStore, RawCodec
from specter.models.checkpoint import INDEX_FILE, Checkpoint, write_checkpoint
from specter.models.cpu.live import LiveModel, LoadPlan
from specter.models.hub_config import config_of
from specter.models.names import expected_shapes
from specter.models.spec import ModelSpec
from specter.resolve import resolve
from tests.helpers import FAMILIES, TINY, TINY_PHI, TINY_QWEN, write_random
from tests.parity.oracle import load_oracle

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SPECS = {**FAMILIES, "qwen, tied": dataclasses.replace(TINY_QWEN, tied=True)}


def written_by_transformers(spec: ModelSpec, dtype: torch.dtype, tmp_path: Path, per_expert: bool = True) -> Path:
    """Many uneven shards of a random model; its own values are in tmp_path / "ours"."""
    write_random(tmp_path / "ours", spec, seed=5)
    model: Any = load_oracle(tmp_path / "ours")
    model = model.to(dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB", save_original_format=per_expert)
    return tmp_path / "theirs"


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_what_transformers_saves_is_read(spec: ModelSpec, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = written_by_transformers(spec, dtype, tmp_path)
    ours, theirs = Checkpoint.open(tmp_path / "ours"), Checkpoint.open(directory)
    assert dataclasses.replace(theirs.spec, name=spec.name) == spec
    assert theirs.num_files > 5 and len(theirs.stored_bytes) == 1
    for name in expected_shapes(spec):
        assert torch.equal(theirs.tensor(name), ours.tensor(name).to(dtype).float()), name


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES.keys())
def test_fused_experts_that_transformers_saves_are_read(spec: ModelSpec, tmp_path: Path) -> None:
    directory = written_by_transformers(spec, torch.float32, tmp_path, per_expert=False)
    assert "gate_up_proj" in (directory / INDEX_FILE).read_text()
    ours, theirs = Checkpoint.open(tmp_path / "ours"), Checkpoint.open(directory)
    for layer in range(spec.num_moe_layers):
        for mine, other in zip(ours.experts(layer), theirs.experts(layer), strict=True):
            assert torch.equal(mine, other)


# -- memory ---------------------------------------------------------------------------------------------------

MIDDLE = dataclasses.replace(
    TINY_QWEN, num_layers=5, hidden=512, num_heads=4, num_kv_heads=4, expert_inter=256, num_experts=48
)


def resident_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_loading_peaks_at_the_experts_once(fused: bool, tmp_path: Path) -> None:
    shapes = expected_shapes(MIDDLE, fused)
    tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    write_checkpoint(tmp_path, MIDDLE, tensors)
    del tensors
    checkpoint = Checkpoint.open(tmp_path)
    codec = RawCodec(torch.bfloat16, MIDDLE.expert_inter, MIDDLE.hidden)
    checkpoint.tensor("model.layers.0.mlp.gate.weight")  # imports of the first read
    ctypes.CDLL(None).malloc_trim(0)  # memory that is already free is not counted
    before = resident_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    store = ExpertStore.read(codec, checkpoint, range(MIDDLE.num_moe_layers))
    peak = resident_kb("VmHWM") - before
    num_bytes = sum(part.nbytes for layer in range(MIDDLE.num_moe_layers) for part in store.layer(layer))
    assert num_bytes == 2 * MIDDLE.experts_params > 100 * 2**20
    assert 0.9 * num_bytes < peak * 1024 < 1.1 * num_bytes


def test_the_plan_adds_up_and_refuses_too_little_memory(tmp_path: Path) -> None:
    write_random(tmp_path, TINY_PHI)
    checkpoint = Checkpoint.open(tmp_path)

    def plan(available: int) -> LoadPlan:
        return LoadPlan.build(
            checkpoint, torch.float32, has_draft=True, slot_bytes=5000, kv_capacity=100, available=lambda: available
        )

    spec = TINY_PHI
    needed = 2 * spec.experts_params + spec.non_expert_params + spec.num_layers * 100 * spec.kv_width
    assert plan(0).needed_bytes == round(1.1 * (4 * needed + 5000))
    plan(plan(0).needed_bytes).check()
    with pytest.raises(SpecterError, match="needs .* GB of host memory, .* are available"):
        plan(plan(0).needed_bytes - 1).check()
    text = io.StringIO()
    Console(file=text, width=120).print(plan(10**9).table())
    assert "3 x 8 experts, float32" in text.getvalue() and "GB F32 in 1 files" in text.getvalue()


def test_a_checkpoint_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.plan import compose
    from specter.progress import make_progress

    write_random(tmp_path, TINY_QWEN)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("a tensor was read"))
    config = compose([f"model.checkpoint={tmp_path}", "model.charged_as=itself", "model.checkpoint_kind=hub"])
    text = io.StringIO()
    with (
        make_progress(Console(file=text, width=120)) as progress,
        pytest.raises(SpecterError, match="GB of host memory"),
    ):
        LiveModel.load(resolve(config), progress)
    assert "store: 3 x 8 experts" in text.getvalue()


# -- damage ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return written_by_transformers(TINY_QWEN, torch.float16, tmp_path)


def test_all_missing_shards_are_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    with pytest.raises(SpecterError, match=rf"{gone[0].name}.*is missing \(2 of") as caught:
        Checkpoint.open(sharded)
    assert all(path.name in str(caught.value) for path in gone)


@pytest.mark.parametrize("astray", ["elsewhere", "nowhere"])
def test_an_index_that_points_to_the_wrong_file_is_named(sharded: Path, astray: str) -> None:
    path = sharded / INDEX_FILE
    index = json.loads(path.read_text())
    name, file = next(iter(index["weight_map"].items()))
    if astray == "elsewhere":
        index["weight_map"][name] = next(other for other in index["weight_map"].values() if other != file)
    else:
        index["weight_map"]["model.layers.9.mlp.gate.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(SpecterError, match="it is in" if astray == "elsewhere" else "no shard has it"):
        Checkpoint.open(sharded)


def test_weights_of_another_family_are_named_as_on_the_hub(tmp_path: Path) -> None:
    write_random(tmp_path, TINY)
    (tmp_path / "config.json").write_text(json.dumps(config_of(TINY_PHI)))
    with pytest.raises(SpecterError, match="tensor model.norm.bias is missing"):
        Checkpoint.open(tmp_path)
    write_random(tmp_path, TINY_PHI)
    spec = dataclasses.replace(TINY_PHI, num_experts=9)
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec)))
    with pytest.raises(SpecterError, match=r"block_sparse_moe.experts.8.w1.weight is missing"):
        Checkpoint.open(tmp_path)


def test_extra_tensors_are_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    save_file({"model.layers.0.extra": torch.zeros(2)}, sharded / "extra.safetensors")
    index["weight_map"]["model.layers.0.extra"] = "extra.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(SpecterError, match="model.layers.0.extra is unexpected"):
        Checkpoint.open(sharded)


# -- hub ids --------------------------------------------------------------------------------------------------

REPOSITORY = "someone/Tiny-Qwen"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of an offline cache's one repository."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = cache / "models--someone--Tiny-Qwen"
    snapshot = repository / "snapshots" / ("0" * 40)
    write_random(snapshot, TINY_QWEN)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_id_is_found_in_the_offline_cache(offline: Path) -> None:
    directory = hub.find_checkpoint(REPOSITORY, Console())
    assert directory == offline
    assert Checkpoint.open(directory).spec.family == "qwen2_moe"


def test_a_run_names_its_tokenizer_below_the_hub_id(offline: Path) -> None:
    from harness.plan import compose

    config = compose([f"model.checkpoint={REPOSITORY}", f"model.tokenizer={REPOSITORY}/tokenizer.json"])
    found = hub.with_local_paths(config, Console()).model
    assert (found.checkpoint, found.tokenizer) == (str(offline), str(offline / "tokenizer.json"))
    local = compose(["model.checkpoint=data/standins"])
    assert hub.with_local_paths(local, Console()) == local


def test_what_the_offline_cache_lacks_is_refused(offline: Path) -> None:
    with pytest.raises(SpecterError, match="(?s)neither on the hub nor in the cache.*hf download someone/Other"):
        hub.find_checkpoint("someone/Other", Console())
    with pytest.raises(SpecterError, match="neither a directory nor a hub id"):
        hub.find_checkpoint("no/such/place", Console())
    config = offline / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "mixtral"}))
    with pytest.raises(SpecterError, match="'mixtral' is not supported"):
        hub.find_checkpoint(REPOSITORY, Console())


def test_a_download_is_announced_and_a_full_disk_refuses_it(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def snapshot(repository: str, allow_patterns: list[str], dry_run: bool = False) -> object:
        file = type("File", (), {"will_download": True, "file_size": 3 * 10**9})
        return [file, file] if dry_run else str(offline)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    text = io.StringIO()
    assert hub.find_checkpoint(REPOSITORY, Console(file=text, width=200)) == offline
    assert "2 of 2 files to download, 6.0 GB" in text.getvalue()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * 10**9}))
    with pytest.raises(SpecterError, match="needs 6000000000 bytes on disk"):
        hub.find_checkpoint(REPOSITORY, Console())
