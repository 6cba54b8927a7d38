"""Files are written whole or not at all; digests and JSON objects are read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from specter.errors import SpecterError
from specter.files import (
    check_free,
    check_writable,
    files_digest,
    read_object,
    replacing,
    replacing_directory,
    write_json,
    write_whole,
)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_whole(path, "old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old", "the old content stays until the new one is complete"
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_whole(path, b"old")

    def write_half() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_json_ends_with_a_newline_and_reads_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2]})
    assert (tmp_path / "a.json").read_text().endswith("}\n")
    assert read_object(tmp_path / "a.json", "") == {"b": [1, 2]}


@pytest.mark.parametrize(
    ("content", "what"), [(None, "no a.json in"), ("{", "is not JSON"), ("[]", "holds a list"), ("1", "holds a int")]
)
def test_what_is_not_an_object_is_named_with_the_remedy(tmp_path: Path, content: str | None, what: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(SpecterError, match=what) as error:
        read_object(tmp_path / "a.json", "make it again")
    assert error.value.remedy == "make it again"


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "of a killed run").touch()
    with replacing_directory(tmp_path / "out") as directory:
        (directory / "a").touch()
        assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]

    def fill_half() -> None:
        with replacing_directory(tmp_path / "other") as directory:
            (directory / "a").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    check_free(tmp_path)
    check_free(tmp_path / "absent")
    (tmp_path / "a").touch()
    for out in (tmp_path, tmp_path / "a"):
        with pytest.raises(SpecterError, match="exists already"), replacing_directory(out):
            pass


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(SpecterError, match="cannot be written"):
        check_writable(Path("/proc/results"))
    with pytest.raises(SpecterError, match="cannot be written"), replacing_directory(Path("/proc/out")):
        pass


def test_the_digest_follows_names_and_contents(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a.py", "1"), ("b.py", "1"), ("b.py", "2"), ("c.txt", "3")):
        (tmp_path / name).write_text(content)
        digests.add(files_digest(tmp_path, "*.py"))
    assert len(digests) == 3, "another pattern's file does not count"
    assert files_digest(tmp_path, "*.py", "b.*") == files_digest(tmp_path, "*.py"), "a file counts once"
