"""The layers of the repository: a room imports only rooms below it, and no module imports itself through others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from specter.sources import PACKAGES, ROOT

# From the bottom up. An entry stands for a module, or for every module of a package that no other entry names.
ROOMS = (
    ("errors", ["specter.errors"]),
    ("shared tools", ["specter.registry", "specter.files", "specter.sources", "specter.arguments",
                      "specter.progress", "specter.provenance", "specter.typed", "specter.sample",
                      "specter.host_memory"]),
    ("what a model is", ["specter.models.spec", "specter.models.base", "specter.models.hub_config",
                         "specter.models.families"]),
    ("clocks and costs", ["specter.timeline", "specter.records"]),
    ("texts and tokens", ["specter.text"]),
    ("INT4 matrices", ["specter.codecs"]),
    ("kernels", ["specter.kernels"]),
    ("checkpoints and shared numerics", ["specter.models"]),
    ("quantizers", ["specter.quantize"]),
    ("policies", ["specter.experts", "specter.speculation"]),
    ("configuration", ["specter.config", "specter.execution", "specter.floors", "specter.recording"]),
    ("tokens from logits", ["specter.speculation.sampling"]),
    ("what a run needs", ["specter.hub", "specter.memory", "specter.resolve", "specter.prompts"]),
    ("the quantizers' commands", ["specter.quantize.cli", "specter.quantize.__main__",
                                  "specter.quantize.residual.__main__"]),
    ("the engine", ["specter.engine", "specter.rounds"]),
    ("one input", ["specter.metrics", "specter.session"]),
    ("models that compute", ["specter.models.cpu", "specter.models.inflation", "specter.models.cuda"]),
    ("records on disk, probes", ["specter.results", "specter.probes", "specter.calibrate"]),
    ("generations", ["specter.generation"]),
    ("the server", ["specter.serving"]),
    ("the command lines", ["specter.run", "specter.cli", "specter.__main__"]),
    ("baselines", ["baselines"]),
    ("benches, training of stand-ins", ["bench", "tools"]),
    ("the workflow", ["harness"]),
)  # fmt: skip
FORBIDDEN = {
    "specter": {"baselines", "bench", "harness", "tools"},
    "baselines": {"bench", "harness", "tools"},
    "bench": {"harness", "tools"},
    "tools": {"harness"},
}


def _modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = _modules()


def _imports(name: str) -> Iterator[str]:
    """Modules of this repository that `name` imports, inside functions and for type checking too."""
    tree = ast.parse(MODULES[name].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module
                     for a in node.names]  # fmt: skip
        else:
            continue
        yield from (one for one in names if one in MODULES and one != name)


IMPORTS = {name: set(_imports(name)) for name in MODULES}


def _room(name: str) -> int:
    """The index of the entry with the longest match."""
    matches = [
        (len(entry), index)
        for index, (_, entries) in enumerate(ROOMS)
        for entry in entries
        if name == entry or name.startswith(f"{entry}.")
    ]
    assert matches, f"{name} is in no room: add it to ROOMS"
    return max(matches)[1]


def test_rooms_import_only_downwards() -> None:
    upwards = [
        f"{name} ({ROOMS[_room(name)][0]}) imports {other} ({ROOMS[_room(other)][0]})"
        for name, others in IMPORTS.items()
        for other in sorted(others)
        if name not in PACKAGES and name != "specter" and other not in PACKAGES and _room(other) > _room(name)
    ]
    assert not upwards, "\n".join(upwards)


def test_no_module_imports_itself_through_others() -> None:
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 1:
            pytest.fail(" -> ".join((*path[path.index(name) :], name)))
        if name not in state:
            state[name] = 1
            for other in sorted(IMPORTS[name]):
                visit(other, (*path, name))
            state[name] = 2

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_stay_apart(package: str) -> None:
    found = {
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if name.split(".")[0] == package and other.split(".")[0] in FORBIDDEN[package]
    }
    assert not found, "\n".join(sorted(found))


def test_files_fit_a_reader() -> None:
    long = {name: n for name, path in MODULES.items() if (n := len(path.read_text().splitlines())) > 330}
    assert not long
