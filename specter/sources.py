"""The source files that a module imports, and a digest of them that ignores comments and docstrings.

Cache keys and the workflow's `params` use this instead of hand-kept lists: a job is stale if, and only if, code
that it can execute has changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specter", "baselines", "harness", "bench", "tools")


def imported_files(*modules: str) -> list[Path]:
    """Files of this repository that these modules import, directly or not, themselves included; sorted.

    Imports inside functions count. A package stands for all of its modules. Files that do not exist are left out.
    """
    found: set[Path] = set()
    todo = [path for module in modules for path in _files_of(module, whole_package=True)]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += _imports(path)
    return sorted(found)


def code_digest(*modules: str) -> str:
    """A short digest of `imported_files(*modules)`: the same after a change in comments, docstrings or layout."""
    total = hashlib.sha256()
    for path in imported_files(*modules):
        total.update(f"{path.relative_to(ROOT)} {_content(path)}\n".encode())
    return total.hexdigest()[:16]


def _files_of(module: str, whole_package: bool = False) -> Iterator[Path]:
    """The file of a module and the `__init__` files of the packages around it."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return
    for length in range(1, len(parts)):
        yield from _if_file(ROOT.joinpath(*parts[:length], "__init__.py"))
    place = ROOT.joinpath(*parts)
    yield from _if_file(place.with_suffix(".py"))
    yield from place.rglob("*.py") if whole_package else _if_file(place / "__init__.py")


def _if_file(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def _imports(path: Path) -> list[Path]:
    """Files that one file imports at run time; blocks under `if TYPE_CHECKING` are not executed."""
    found: list[Path] = []
    skipped = {
        id(node)
        for block in ast.walk(_tree(path))
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(_tree(path)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [file for name in names for file in _files_of(name)]
    return found


@functools.cache
def _content(path: Path) -> str:
    """A digest of a file's syntax tree without docstrings."""
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
