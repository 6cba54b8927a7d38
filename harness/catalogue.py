"""All figures and tables: which of them a scale or a machine's records can fill, and from which files.

The modules of `harness.studies` are imported here, and register what they define.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.scales import Scale, load_scale
from harness.studies.registry import DEVICE, FIGURES, TABLES, FigureStudy, TableStudy
from specter.registry import Registry, import_modules

__all__ = ["FIGURES", "TABLES", "device_figures", "device_tables", "figure_model", "figures", "records", "tables"]
import_modules("harness.studies")


def _on_device(name: str) -> bool:
    return name.startswith(f"{DEVICE}.")


def figures(scale: str) -> list[str]:
    """The figures that a scale can fill, as files are named: of a model but the scale's first, `figure-model`."""
    size = load_scale(scale)
    names = []
    for name in _filled(size, FIGURES):
        shown = size.models_of(*FIGURES[name].sources) if FIGURES[name].one_model else size.models[:1]
        names += [name if model == size.models[0] else f"{name}-{model}" for model in shown]
    return names


def tables(scale: str) -> list[str]:
    """The tables that a scale can fill."""
    return _filled(load_scale(scale), TABLES)


def _filled(size: Scale, studies: Registry[Any]) -> list[str]:
    """The names of studies that a scale has sources for, in the order of its experiments; probes are last."""
    names = [name for name in studies.names() if not _on_device(name) and size.models_of(*studies[name].sources)]
    order = {name: index for index, name in enumerate(size.experiments)}
    return sorted(names, key=lambda name: order.get(studies[name].sources[0], len(order)))


def figure_model(scale: str, file_name: str) -> str:
    """The model that a figure's file shows; empty if it shows all."""
    name, _, model = file_name.partition("-")
    return (model or load_scale(scale).models[0]) if FIGURES[name].one_model else ""


def device_figures(machine: Path | None = None) -> list[str]:
    """The figures that the records of a machine can fill, without their prefix; of no machine: all."""
    return _of_device(FIGURES, machine)


def device_tables(machine: Path | None = None) -> list[str]:
    """The tables that the records of a machine can fill, without their prefix; of no machine: all."""
    return _of_device(TABLES, machine)


def _of_device(studies: Registry[Any], machine: Path | None) -> list[str]:
    names = [name for name in studies.names() if _on_device(name)]
    return [name.partition(".")[2] for name in names if machine is None or records(machine, studies[name])]


def records(machine: Path, study: FigureStudy | TableStudy) -> list[Path]:
    """The files in data/reference/<machine> that a study is made from; none if one of its sources is missing."""
    found = [sorted(machine.glob(f"{source}.*")) for source in study.sources]
    return [path for paths in found for path in paths] if all(found) else []
