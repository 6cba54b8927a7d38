"""Makes one figure or one table: python -m harness.jobs.draw figure=tpot model=... out=a.png,a.pdf tidy=main.parquet"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.catalogue import FIGURES, TABLES
from harness.plotting import charts, tables
from harness.plotting.frames import of_model, read
from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json

CAPTION = ".json"  # the format of a figure's caption


@dataclass(frozen=True)
class Options:
    """Makes one figure or one table from tidy tables."""

    out: tuple[Path, ...]  # a file per format; a figure's .json is its caption, for the report
    tidy: tuple[Path, ...]  # the sources of the figure or table
    figure: str = ""
    table: str = ""
    model: str = ""  # of a figure that shows one model


def main(options: Options) -> None:
    if bool(options.figure) == bool(options.table):
        raise SpecterError("neither or both of figure and table are given", "give figure=NAME or table=NAME")
    frames = read(options.tidy)
    if options.model:
        frames = of_model(frames, options.model)
    if options.figure:
        study = FIGURES[options.figure]
        charts.save(study.make(frames), [path for path in options.out if path.suffix != CAPTION])
        for path in options.out:
            if path.suffix == CAPTION:
                write_json(path, study.caption(frames))
    else:
        tables.save(TABLES[options.table].build(frames), options.out)
    print(f"wrote {', '.join(map(str, options.out))}")


if __name__ == "__main__":
    run_command(main, Options)
