"""No text of a figure overlaps another or leaves the canvas, and no legend covers a panel, whatever is drawn."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from harness import catalogue
from harness.catalogue import FIGURES, TABLES, figures
from harness.plotting.charts import FOOTER_POINTS, Grid, note, wrapped
from harness.plotting.fit import faults
from harness.plotting.frames import Frames, read
from tests.workflow.test_study_data import frames_of

MODELS = ("deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe")
MACHINES = [path for path in sorted(Path("data/reference").iterdir()) if path.is_dir()]
OF_MACHINES = [(machine, name) for machine in MACHINES for name in catalogue.of_device(FIGURES, machine)]
LAPTOP = [name for name in figures("laptop") if "-" not in name]


def of_all_models(frames: Frames) -> Frames:
    """The rows of one model again as those of all."""
    found = {}
    for name, frame in frames.items():
        keys = [key for key in ("model", "charged_as") if key in frame]
        one = frame[frame["model"] == frame["model"].iloc[0]]
        found[name] = pd.concat([one.assign(**dict.fromkeys(keys, model)) for model in MODELS])
    return found


def assert_is_legible(figure: Figure) -> None:
    assert faults(figure) == []
    below = figure.texts[0].get_text()
    assert below and below.count("\n") < 2, "the footer has more than two lines"


@pytest.mark.parametrize("name", LAPTOP)
def test_a_figure_is_legible(name: str) -> None:
    frames = frames_of(name)
    assert_is_legible(FIGURES[name].make(frames))
    if not FIGURES[name].one_model:
        assert_is_legible(FIGURES[name].make(of_all_models(frames)))


@pytest.mark.parametrize(("machine", "name"), OF_MACHINES, ids=str)
def test_a_figure_of_records_is_legible(machine: Path, name: str) -> None:
    study = FIGURES[f"device.{name}"]
    assert_is_legible(study.make(read(catalogue.records(machine, study))))


def test_every_figure_is_looked_at() -> None:
    assert {*LAPTOP, *(f"device.{name}" for _, name in OF_MACHINES)} == set(FIGURES.names())
    assert set(TABLES.names())


def drawn(data: pd.DataFrame, **options: object) -> Grid:
    return Grid(data, height=2, **options)  # type: ignore[arg-type]


def test_faults_are_found() -> None:
    data = pd.DataFrame({"x": [1]})
    grid = drawn(data)
    ((panel,),) = grid.axes
    panel.plot([0, 1], label="line")
    assert faults(grid.finish("Words.")) == []
    panel.text(0.5, 0.5, "one")
    panel.text(0.51, 0.5, "two")
    panel.text(2.5, 0.5, "far")
    panel.legend()
    found = faults(grid.figure)
    assert "'one' overlaps 'two'" in found and "'far' leaves the canvas" in found and "a legend covers a panel" in found


def test_a_tick_out_of_view_is_no_text() -> None:
    grid = drawn(pd.DataFrame({"x": [1]}))
    ((panel,),) = grid.axes
    panel.plot([0, 10], [0, 1])
    panel.set_xticks([1, 1.01, 9])
    assert any("overlaps" in fault for fault in faults(grid.finish("Words.")))
    panel.set_xlim(5, 10)
    assert faults(grid.figure) == []


def test_numbers_shrink_until_they_fit() -> None:
    grid = drawn(pd.DataFrame({"x": [1]}))
    ((panel,),) = grid.axes
    panel.plot([0, 100], [0, 1])
    for x in (50, 52.6):
        note(panel, "1234", (x, 0.5))
    assert any("overlaps" in fault for fault in faults(grid.figure))
    assert faults(grid.finish("Words.")) == []


def test_a_legend_takes_the_rows_that_it_needs() -> None:
    grid = drawn(pd.DataFrame({"x": [1]}), legend=True)
    ((panel,),) = grid.axes
    for number in range(9):
        panel.plot([0, 1], label=f"a series with the long name {number}")
    (legend,) = grid.finish("Words.").legends
    assert legend.get_window_extent().width <= grid.figure.bbox.width and faults(grid.figure) == []


def test_words_are_wrapped_at_their_width() -> None:
    text = "Clock: virtual, A100 40 GB; 5 data sets × 5 inputs, T = 1. " * 4
    lines = wrapped(text, FOOTER_POINTS, 4.0)
    assert " ".join(lines).split() == text.split() and len(lines) == 3
    assert not any(line.startswith(("=", "×")) or line.endswith(("=", "×")) for line in lines)
