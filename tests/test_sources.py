"""What a job imports, and digests of it that follow code and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from specter import sources

FILES = {
    "specter/__init__.py": "",
    "specter/a.py": '"""A."""\nfrom specter.b import f\n\ndef g():\n    from specter import c\n',
    "specter/b.py": "def f(): ...\n",
    "specter/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specter import unused\n",
    "specter/unused.py": "",
    "specter/kinds/__init__.py": "from specter.registry import import_modules\nimport_modules(__name__)\n",
    "specter/kinds/x.py": "",
    "specter/kinds/big/config.json": "{}",
    "specter/d.py": "import specter.kinds\nimport json\n",
    "specter/e.py": 'from specter.registry import import_modules\nimport_modules("harness")\n',
    "specter/registry.py": "",
    "harness/y.py": "",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    return tmp_path


def _imported(tree: Path, *modules: str) -> set[str]:
    return {str(path.relative_to(tree)) for path in sources.imported_files(*modules)}


def _digest(module: str) -> str:
    sources._imports.cache_clear()
    sources._content.cache_clear()
    return sources.code_digest(module)


def test_imports_are_followed_into_functions_and_not_into_type_checking(tree: Path) -> None:
    assert _imported(tree, "specter.a") == {"specter/__init__.py", "specter/a.py", "specter/b.py", "specter/c.py"}


def test_a_package_that_imports_its_modules_brings_them_and_its_configs(tree: Path) -> None:
    assert _imported(tree, "specter.d") >= {"specter/kinds/x.py", "specter/kinds/big/config.json"}
    assert "harness/y.py" in _imported(tree, "specter.e")


def test_a_package_stands_for_its_modules(tree: Path) -> None:
    assert "specter/kinds/x.py" in _imported(tree, "specter.kinds")
    assert _imported(tree, "numpy", "specter.nothing") == {"specter/__init__.py"}


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("specter/b.py", "# a comment\ndef f():\n    ...\n", False),
        ("specter/a.py", FILES["specter/a.py"].replace("A.", "Another."), False),
        ("specter/b.py", "def f(): return 1\n", True),
        ("specter/unused.py", "x = 1\n", False),
    ],
)
def test_the_digest_follows_code_only(tree: Path, name: str, text: str, changes: bool) -> None:
    before = _digest("specter.a")
    (tree / name).write_text(text)
    assert (_digest("specter.a") != before) is changes


def test_the_digest_follows_a_config(tree: Path) -> None:
    before = _digest("specter.d")
    (tree / "specter/kinds/big/config.json").write_text('{"a": 1}')
    assert _digest("specter.d") != before
