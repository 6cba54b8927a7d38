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

    Imports inside functions count. A package among `modules`, or one given to `registry.import_modules` by a constant
    or `__name__`, stands for all of its modules. `NAME/config.json` below an imported package belongs to it. Files that
    do not exist are left out.
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
    place = ROOT.joinpath(*parts)
    packages = [ROOT.joinpath(*parts[: length + 1], "__init__.py") for length in range(len(parts))]
    yield from (path for path in (*packages, place.with_suffix(".py")) if path.is_file())
    if whole_package:
        yield from place.rglob("*.py")


@functools.cache
def _imports(path: Path) -> list[Path]:
    """Files that one file imports at run time; blocks under `if TYPE_CHECKING` are not executed."""
    if path.suffix != ".py":
        return []
    tree = ast.parse(path.read_text(), str(path))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = list(path.parent.glob("*/config.json")) if path.name == "__init__.py" else []
    package = ".".join(path.parent.relative_to(ROOT).parts)
    for node in ast.walk(tree):
        if id(node) not in skipped:
            found += [file for name in _imported_names(node) for file in _files_of(name)]
            found += [file for name in _whole_packages(node, package) for file in _files_of(name, whole_package=True)]
    return found


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _whole_packages(node: ast.AST, package: str) -> list[str]:
    """The package that a call of `import_modules` names; `package` is the caller's."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_modules"):
        return []
    argument = node.args[0]
    if isinstance(argument, ast.Name) and argument.id == "__name__":
        return [package]
    return [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []


@functools.cache
def _content(path: Path) -> str:
    """A digest of a file's syntax tree without docstrings, or of a data file's text."""
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                    node.body = rest
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
