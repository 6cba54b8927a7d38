"""Host memory inside containers."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from specter import host_memory


def available(root: Path, membership: str, machine: int = 10_000) -> int:
    (root / "membership").write_text(membership)
    with mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=machine)):
        return host_memory.available_bytes(root / "groups", root / "membership")


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_a_group_the_machine_decides(tmp_path: Path) -> None:
    assert available(tmp_path, "") == 10_000
    assert available(tmp_path, "0::/gone\n") == 10_000
    assert host_memory.available_bytes(tmp_path, tmp_path / "no file") > 0


def test_a_group_of_version_2_limits_what_its_page_cache_does_not_give_back(tmp_path: Path) -> None:
    write(
        tmp_path / "groups/box", memory__max=5000, memory__current=4500,
        memory__stat="anon 1500\ninactive_file 3000\nactive_file 7",
    )  # fmt: skip
    assert available(tmp_path, "0::/box\n") == 3500
    write(tmp_path / "groups/box", memory__max="max")
    assert available(tmp_path, "0::/box\n") == 10_000


def test_an_outer_group_limits_too_and_so_does_the_top_inside_a_container(tmp_path: Path) -> None:
    write(tmp_path / "groups/outer/inner", memory__max="max", memory__current=1)
    write(tmp_path / "groups/outer", memory__max=800, memory__current=300)
    assert available(tmp_path, "0::/outer/inner\n") == 500
    write(tmp_path / "groups", memory__max=700, memory__current=600)
    assert available(tmp_path, "0::/docker/of-the-host\n") == 100


@pytest.mark.parametrize(("limit", "expected"), [(2000, 1600), (2**63 - 4096, 10_000)])
def test_a_group_of_version_1_limits(tmp_path: Path, limit: int, expected: int) -> None:
    write(
        tmp_path / "groups/memory/box", memory__limit_in_bytes=limit, memory__usage_in_bytes=900,
        memory__stat="cache 600\ntotal_inactive_file 500",
    )  # fmt: skip
    assert available(tmp_path, "5:cpu,cpuacct:/box\n4:memory:/box\n") == expected


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "groups/box", memory__max=100, memory__current=400)
    assert available(tmp_path, "0::/box\n") == 0
