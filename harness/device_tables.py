"""Tables of what was measured on a device: `data/reference/<machine>/{rounds,families_*}.json`.

python -m harness.device_tables choices data/reference/h200 --out paper_tables/device/h200_choices.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.device import OURS, SWITCHED, choice_cells, over_floors, provenance, read_cells
from harness.frames import MODELS, SYSTEMS, Table, in_order, titled
from harness.jobs import run_job
from harness.scales import read_record
from harness.tables import save
from specter.errors import SpecterError

# Rows of a family's bench: a part of the name, and the column.
LATENCIES = {
    "draft step": "draft step (ms)",
    "plain decoding": "plain step, resident (ms)",
    "experts of a layer: BF16 grouped": "BF16 experts, 1 row (us)",
    "experts of a layer: INT4 fused, 2 launches": "INT4 fused, 1 row (us)",
    "experts of a layer: INT4 fused, one expert": "INT4 by expert, 1 row (us)",
    "experts of a layer: INT4 reference": "INT4 reference, 1 row (us)",
    "prefill of 16 rows, a layer: INT4 fused, 2 launches": "INT4 fused, 16 rows (us)",
    "prefill of 16 rows, a layer: INT4 fused, one expert": "INT4 by expert, 16 rows (us)",
    "prefill of 16 rows, a layer: INT4 reference": "INT4 reference, 16 rows (us)",
}


def choices(directory: Path) -> Table:
    """How far each choice is from the floor, greedy and K = 16."""
    where, cells = read_cells(directory)
    cells = choice_cells(cells)
    ratios = over_floors(cells).rename(columns={"high": "high budget (× floor)", "low": "low budget (× floor)"})
    frame = ratios.reset_index(names="switched")
    notes = [
        "× floor: mean TPOT over mean floor_trace of the same texts: the fewest loads possible, at the link's measured "
        f"rate. {SWITCHED}",
        *provenance(where, cells).splitlines(),
    ]
    return Table("The cost of each choice on a device", frame, 1, notes, _stated(where))


def rivals(directory: Path) -> Table:
    """Every rival beside `specter_deadline`, on the same texts.

    Raises:
        SpecterError: the record has no section `rivals`, or their tokens differ from plain decoding's.
    """
    path = directory / "rounds.json"
    content = read_record(path)
    where, facts = content["provenance"], content["facts"].get("rivals")
    if facts is None:
        raise SpecterError(
            f"{path} has no rivals",
            "measure them into it: python -m specter.bench rounds sections=rivals out=...",
        )
    _demand_equal(path, content["summary"], "rivals_bit_equal")
    cells = {(cell["system"], cell["tier"]): cell for cell in facts["cells"] if cell["system"] != "resident"}
    rows = []
    for tier in ("high", "low"):
        names = in_order([name for name, at in cells if at == tier], SYSTEMS)
        for cell in (cells[name, tier] for name in names):
            ours = cells[OURS, tier]["tpot_ms"]["values"][: len(cell["tpot_ms"]["values"])]
            rows.append(
                {
                    "budget": tier,
                    "system": titled(SYSTEMS, cell["system"]),
                    "K": str(cell["k"] or "–"),
                    "TPOT (ms)": cell["tpot_ms"]["mean"],
                    "× ours": cell["tpot_ms"]["mean"] / (sum(ours) / len(ours)),
                    "× floor_trace": cell["over_floor_trace"]["mean"],
                    "hits (%)": cell["hit_rate"]["mean"] * 100,
                    "acceptance (%)": cell.get("acceptance", {}).get("mean", float("nan")) * 100,
                    "texts": str(cell["num_prompts"]),
                }
            )
    notes = [
        f"Device clock; {where['gpu']}; {where['model']}; greedy, {facts['num_tokens']} tokens; tokens of all equal "
        "plain decoding's. × ours: over our TPOT on the same texts. × floor_trace: mean of the texts' ratios.",
        *[f"{key}: {note}." for key, note in facts["notes"].items()],
    ]
    return Table("Rivals on a device, at equal slots", pd.DataFrame(rows), 3, notes, _stated(where))


def families(directory: Path) -> Table:
    """16 bits against INT4, model by model.

    Raises:
        SpecterError: no model was measured, or a model's tokens differ from plain decoding's.
    """
    found = {path.stem.removeprefix("families_"): path for path in directory.glob("families_*.json")}
    if not found:
        raise SpecterError(f"{directory} has no families_*.json", "measure: python -m specter.bench families model=...")
    rows, sources = [], []
    for model in in_order(list(found), MODELS):
        content = read_record(found[model])
        summary, where = content["summary"], content["provenance"]
        _demand_equal(found[model], summary, "bit_equal.texts")
        latencies = {
            column: next((row["median"] for row in content["table"] if row["name"].startswith(start)), float("nan"))
            for start, column in LATENCIES.items()
        }
        rows.append(
            {
                "model": titled(MODELS, model),
                **latencies,
                "16 bit, LRU: TPOT (ms)": summary["tpot_ms.lru"],
                "tokens per s": summary["tok_per_s.lru"],
                "INT4 draft, ours: TPOT (ms)": summary["tpot_ms.specter_deadline"],
                "tokens per s, ours": summary["tok_per_s.specter_deadline"],
                "× floor_trace, ours": summary["over_floor_trace.specter_deadline"],
                "acceptance (%)": summary["acceptance.specter_deadline"] * 100,
                "store (GB/s)": summary["store_load_gb_per_s"],
                "peak device (GB)": summary["peak_device_gb"],
            }
        )
        slots = content["facts"]["slots"]
        sources.append(f"{titled(MODELS, model)}: {where['model']}; {where['gpu']}; slots: {slots}; {where['commit']}.")
    notes = [
        "Device clock; medians of 5; published high budget and K, equal slots, greedy; tokens of both systems equal "
        "those of resident plain decoding. Experts: those of one layer. × floor_trace: mean of the texts' ratios.",
        *sources,
    ]
    stated = {"clock": "device", "checkpoint": "narrow stand-ins, inflated"}
    return Table("16 bits against INT4, by model", pd.DataFrame(rows), 1, notes, stated)


def _demand_equal(path: Path, summary: dict[str, Any], key: str) -> None:
    """Raises SpecterError if the record of `path` does not say that tokens were plain decoding's."""
    if summary.get(key) is not True:
        raise SpecterError(
            f"{path}: {key} is not true, its tokens were not shown to equal plain decoding's",
            f"find out why, and measure again: python -m specter.bench {path.stem.partition('_')[0]}",
        )


def _stated(where: dict[str, Any]) -> dict[str, str]:
    return {"clock": "device", "hardware": where["gpu"], "checkpoint": where["model"]}


BUILD: dict[str, Callable[[Path], Table]] = {build.__name__: build for build in (choices, rivals, families)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=BUILD)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    save(BUILD[arguments.table](arguments.directory), arguments.out)


if __name__ == "__main__":
    run_job(main)
