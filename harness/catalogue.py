"""All figures and tables: which of them a scale or a machine's records can fill, and from which files.

The modules of `harness.studies` are imported here, and register what they define.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.scales import load_scale
from harness.studies.registry import DEVICE, FIGURES, TABLES, FigureStudy, TableStudy
from specter.registry import Registry, import_modules

__all__ = ["FIGURES", "TABLES", "figure_model", "figures", "of_device", "records", "tables"]
import_modules("harness.studies")


def figures(scale: str) -> list[str]:
    """The figures that a scale can fill, as files are named: of a model but the scale's first, `figure-model`."""
    size, names = load_scale(scale), []
    for name in _filled(scale, FIGURES):
        shown = size.models_of(*FIGURES[name].sources) if FIGURES[name].one_model else size.models[:1]
        names += [name if model == size.models[0] else f"{name}-{model}" for model in shown]
    return names


def tables(scale: str) -> list[str]:
    """The tables that a scale can fill."""
    return _filled(scale, TABLES)


def _filled(scale: str, studies: Registry[Any]) -> list[str]:
    """The names of studies that a scale has sources for: what leads, then by experiment; probes are last."""
    size = load_scale(scale)
    sources = {name: studies[name].sources for name in studies.names() if not name.startswith(DEVICE)}
    order = {name: index for index, name in enumerate(size.experiments)}
    filled = [name for name in sources if size.models_of(*sources[name])]
    leads = {name for name in FIGURES.names() if FIGURES[name].leads}
    return sorted(filled, key=lambda name: (name not in leads, order.get(sources[name][0], len(order))))


def figure_model(scale: str, file_name: str) -> str:
    """The model that a figure's file shows; empty if it shows all."""
    name, _, model = file_name.partition("-")
    return (model or load_scale(scale).models[0]) if FIGURES[name].one_model else ""


def of_device(studies: Registry[Any], machine: Path | None = None) -> list[str]:
    """The studies that the records of a machine can fill, without their prefix; of no machine: all."""
    names = [name for name in studies.names() if name.startswith(DEVICE)]
    return [name.removeprefix(DEVICE) for name in names if machine is None or records(machine, studies[name])]


def records(machine: Path, study: FigureStudy | TableStudy) -> list[Path]:
    """The files in data/reference/<machine> that a study is made from; none if one of its sources is missing."""
    found = [sorted(machine.glob(f"{source}.*")) for source in study.sources]
    return [path for paths in found for path in paths] if all(found) else []
