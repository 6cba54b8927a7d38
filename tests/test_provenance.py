"""Where a result comes from: digests that follow the code, a stable record of the host, the GPU beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specter import provenance


def test_the_source_digest_follows_code_and_settings(tmp_path: Path) -> None:
    digests = set()
    for name in ("specter/a.py", "specter/models/cuda/a.py", "baselines/a.py", "conf/system/a.yaml"):
        for content in ("x = 1", "x = 2"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            digests.add(provenance.source_digest(tmp_path))
    assert len(digests) == 8
    (tmp_path / "results.json").write_text("{}")
    assert provenance.source_digest(tmp_path) in digests


def test_a_device_record_holds_this_repository_and_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    values = "580.1, 143771 MiB, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 70 W, 30"
    monkeypatch.setattr(provenance, "_output", lambda *command: values if command[0] == "nvidia-smi" else "")
    record = provenance.of_device(torch.device("cpu"), "abc", model_sha256="1")
    assert record["source_sha256"] == provenance.source_digest(Path("."))
    assert record["commit"] == "abc" and record["model_sha256"] == "1" and record["time_utc"].endswith("Z")
    assert (record["gpu"], record["driver_version"], record["memory.total"]) == ("Test GPU", "580.1", "143771 MiB")
    assert record["temperature.gpu"] == "30" and record["numpy"] != "absent"
    assert all(list(Path(".").glob(pattern)) for pattern in provenance.SOURCES)


def test_a_device_record_without_nvidia_smi_leaves_its_fields_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(provenance, "_output", lambda *command: "")
    record = provenance.of_device(torch.device("cpu"), "abc")
    assert "driver_version" not in record and record["gpu"] == "Test GPU"


def test_the_host_record_has_no_time_and_needs_no_torch() -> None:
    assert list(provenance.of_host()) == ["commit", "python", "torch", "machine", "system"]
    code = "import sys; from specter import provenance; provenance.of_host(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_git_and_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    provenance.commit.cache_clear()
    monkeypatch.delenv("SPECTER_COMMIT", raising=False)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("SPECTER_COMMIT", "abc")
    provenance.commit.cache_clear()
    assert provenance.commit() == "abc"
    provenance.commit.cache_clear()
    assert provenance.package_version("no-such-package") == "absent"


def test_records_are_merged_by_key() -> None:
    records = [{"gpu": "H200", "torch": "2.13"}, {"gpu": "H200", "torch": "2.12"}, {"gpu": "A100"}]
    assert provenance.merged(records, ("gpu", "torch")) == {"gpu": "A100, H200", "torch": "2.12, 2.13, unknown"}
