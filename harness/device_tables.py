"""Tables of what was measured on a device: `data/reference/<machine>/{rounds,families_*,clock}.json`.

python -m harness.device_tables choices data/reference/h200 --out paper_tables/device/h200_choices.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.device import OURS, SWITCHED, choice_cells, over_floors, provenance, read_cells
from harness.device_models import clock_line, demand_equal, median_of, read_clock, read_families
from harness.device_records import read_record
from harness.frames import MODELS, SYSTEMS, in_order, titled
from harness.jobs import run_job
from harness.plotting.tables import Table, save
from specter.errors import SpecterError

# What a model's bench measured: title, and the row of its table.
LATENCIES = {
    "plain step, 16 bit, all resident (ms)": "plain decoding, all resident, BF16",
    "draft step, INT4 fused (ms)": "draft step, graph, 1 row, INT4",
    "draft step, INT4 unfused (ms)": "draft step, graph, 1 row, INT4 unfused",
    "BF16 experts, 1 row (us)": "experts of a layer: BF16 grouped, 2 launches",
    "INT4 fused, 1 row (us)": "experts of a layer: INT4 fused, 2 launches",
    "INT4 by expert, 1 row (us)": "experts of a layer: INT4 fused, one expert at a time",
    "INT4 reference, 1 row (us)": "experts of a layer: INT4 reference (torch: dequantise, multiply)",
    "INT4 fused, 16 rows (us)": "prefill of 16 rows, a layer: INT4 fused, 2 launches",
    "INT4 by expert, 16 rows (us)": "prefill of 16 rows, a layer: INT4 fused, one expert at a time",
    "INT4 reference, 16 rows (us)": "prefill of 16 rows, a layer: INT4 reference (torch: dequantise, multiply)",
}
# The same of whole systems: title, and the key of its summary.
WHOLE = {
    "offloaded, 16 bit, LRU: TPOT (ms)": "tpot_ms.lru",
    "the same, tokens per s": "tok_per_s.lru",
    "offloaded, INT4 draft unfused: TPOT (ms)": "tpot_ms.specter_deadline.unfused",
    "unfused, tokens per s": "tok_per_s.specter_deadline.unfused",
    "offloaded, INT4 draft fused: TPOT (ms)": "tpot_ms.specter_deadline",
    "fused, tokens per s": "tok_per_s.specter_deadline",
    "× floor_trace, fused": "over_floor_trace.specter_deadline",
    "store (GB/s)": "store_load_gb_per_s",
    "peak device (GB)": "peak_device_gb",
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
            "measure them into it: python -m bench rounds sections=rivals out=...",
        )
    demand_equal(path, content["summary"], "rivals_bit_equal")
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
    """16 bits against INT4, model by model. Raises SpecterError as `read_families`."""
    columns, sources = {}, []
    for model, content in read_families(directory).items():
        summary, where = content["summary"], content["provenance"]
        columns[titled(MODELS, model)] = {
            **{title: median_of(content, name) for title, name in LATENCIES.items()},
            **{title: summary.get(key, float("nan")) for title, key in WHOLE.items()},
            "acceptance (%)": summary["acceptance.specter_deadline"] * 100,
        }
        slots = content["facts"]["slots"]
        sources.append(f"{titled(MODELS, model)}: {where['model']}; {where['gpu']}; slots: {slots}; {where['commit']}.")
    notes = [
        "Device clock; medians of 5; published high budget and K, equal slots, greedy; all tokens equal those of "
        "resident plain decoding. Experts: those of one layer. × floor_trace: mean of the texts' ratios. Unfused: "
        "experts chosen one by one and dequantised in plain torch, in a CUDA graph.",
        *sources,
    ]
    stated = {"clock": "device", "checkpoint": "narrow stand-ins, inflated"}
    return Table("16 bits against INT4, by model", pd.DataFrame(columns).reset_index(names=""), 1, notes, stated)


def clock(directory: Path) -> Table:
    """What the virtual clock charges for runs that were measured."""
    where, frame = read_clock(directory)
    rows = []
    for model in in_order(frame["model"].unique().tolist(), MODELS):
        of_model = frame[frame["model"] == model]
        for system in [*in_order(of_model["system"].unique().tolist(), SYSTEMS), "all"]:
            for tier in ("high", "low"):
                mine = of_model[(of_model["tier"] == tier) & ((of_model["system"] == system) | (system == "all"))]
                if len(mine):
                    rows.append(
                        {
                            "model": titled(MODELS, model),
                            "system": titled(SYSTEMS, system),
                            "budget": tier,
                            "measured TPOT (ms)": mine["measured_tpot_ms"].mean(),
                            "charged TPOT (ms)": mine["charged_tpot_ms"].mean(),
                            "charged over measured, median": mine["ratio"].median(),
                            "least": mine["ratio"].min(),
                            "greatest": mine["ratio"].max(),
                            "runs": str(len(mine)),
                        }
                    )
    notes = [f"{clock_line(where, frame)}. Greedy and seeded runs together."]
    stated = {"clock": "virtual against device", "hardware": where["gpu"], "checkpoint": "narrow stand-ins, inflated"}
    return Table("The virtual clock against the device", pd.DataFrame(rows), 3, notes, stated)


def _stated(where: dict[str, Any]) -> dict[str, str]:
    return {"clock": "device", "hardware": where["gpu"], "checkpoint": where["model"]}


BUILD: dict[str, Callable[[Path], Table]] = {build.__name__: build for build in (choices, rivals, families, clock)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=BUILD)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    save(BUILD[arguments.table](arguments.directory), arguments.out)


if __name__ == "__main__":
    run_job(main)
