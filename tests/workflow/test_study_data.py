"""What figures draw is compared with the runs that it comes from, and the ink with what is drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness import artifact, plan
from harness.catalogue import FIGURES, TABLES, figures
from harness.plotting import notes
from harness.plotting.frames import Frames, half_width
from harness.scales import load_scale
from harness.studies import disagreements, published, residual
from harness.studies.best_k import best_data
from harness.studies.planner import SWITCHES
from harness.studies.speedup import finding
from tests.workflow.made_up import PER_LAYER, fidelity, lanes, macro, not_drawn, one, probe, rounds, runs, values

SYSTEMS = (
    "specter",
    "specter_deadline",
    "specter_no_prefetch",
    "specmoeoff",
    "lru",
    "mixtral_offloading",
    "on_demand",
    "resident",
)
TIERS, SAMPLINGS, DATASETS = ("high", "low"), ("greedy", "seeded"), ("gsm8k", "prose")
EXECUTIONS = ("default", "by_expert")
TITLES = {"gsm8k": "GSM8K", "prose": "prose"}
AXES: dict[str, Any] = {"budget": TIERS, "sampling": SAMPLINGS, "dataset": DATASETS, "input": (0, 1, 2)}


def main_runs() -> pd.DataFrame:
    return runs(SYSTEMS, **AXES | {"input": range(5), "policy": ("same_bytes", "published")})


def k_runs() -> pd.DataFrame:
    axes = AXES | {"input": (0,), "k": (2, 8, 16)}
    return runs(("specter", "specter_deadline", "specmoeoff_tuned", "lru"), **axes)


def tuned_runs(policy: str) -> pd.DataFrame:
    """SpecMoEOff with and without its plans."""
    axes = AXES | {"input": (0,), "k": (3, 16, 47), "policy": (policy,)}
    return runs(("specmoeoff_tuned", "specmoeoff_no_plans"), **axes)


def switched_runs() -> pd.DataFrame:
    """Every switch of the published planner, and no other pair of system and execution."""
    executions = tuple(dict.fromkeys(execution for _, execution in SWITCHES))
    frame = runs(tuple(dict.fromkeys(system for system, _ in SWITCHES)), **AXES | {"execution": executions})
    pairs = zip(frame["system"], frame["execution"], strict=True)
    return frame[[pair in SWITCHES for pair in pairs]]


def rival_runs() -> pd.DataFrame:
    axes = AXES | {"sampling": ("seeded",), "policy": ("same_bytes", "same_experts")}
    return runs(("specter", "specter_deadline", "specmoeoff", "lru"), **axes)


def decomposed() -> pd.DataFrame:
    named = {"model": "deepseek_v2_lite", "policy": "same_bytes", "hardware": "a100_40gb_pcie4", "dataset": "gsm8k",
             "rival_k": 3, "hero_k": 16, "rival_ms": 90.0, "hero_ms": 30.0}  # fmt: skip
    parts = ("tokens", "draft", "misses", "hidden", "launches")
    return pd.DataFrame(
        named | {"budget": tier, "hero": hero, "rival": rival, "input": index, "part": part, "ms": ms + 7 * index}
        for tier in TIERS
        for hero in ("specter", "specter_deadline")
        for rival in ("specmoeoff", "lru")
        for index in (0, 1)
        for ms, part in enumerate(parts, start=-2 if rival == "lru" else len(tier) * len(hero))
    )


def residual_runs(**axes: Any) -> pd.DataFrame:
    """Specter+ at the K of every round, the others at three K; blobs of 7 bits."""
    systems = ("lru", "lru_residual", "specter_deadline", "specter_deadline_residual", "specter_plus")
    frame = runs((*systems, "specmoeoff_tuned"), **AXES | {"input": (0,), "k": (8, 16, 32)} | axes)
    is_plus = frame["system"] == "specter_plus"
    codec = ["residual" if name.endswith(("residual", "plus")) else "bf16" for name in frame["system"]]
    return frame.assign(is_auto=is_plus, codec=codec)[~is_plus | (frame["k"] == 32)]


def frames_of(name: str) -> Frames:
    """Made-up tables for the sources of a figure or table."""
    found: dict[str, Callable[[], pd.DataFrame]] = {
        "main": main_runs,
        "k_sweep": k_runs,
        "budget_sweep": lambda: runs(SYSTEMS, **AXES | {"budget": ("2", "16", "64"), "sampling": ("seeded",)}),
        "hardware": lambda: runs(SYSTEMS, **AXES | {"sampling": ("seeded",),
                                                    "hardware": ("h200_pcie5", "a100_40gb_pcie4")}),
        "rivals": rival_runs,
        "published_ablation": lambda: runs(("specter", "specter_no_prefetch"), **AXES | {"execution": EXECUTIONS}),
        "paper_like": lambda: runs(
            ("specter", "specmoeoff", "mixtral_offloading", "lru"),
            **AXES | {"sampling": ("paper_like",), "policy": ("same_bytes", "published")},
        ),
        "int4": lambda: pd.concat([
            runs(("lru",), **AXES | {"sampling": ("greedy",)}),
            runs(("specter_deadline",), **AXES | {"sampling": ("greedy",), "execution": EXECUTIONS}),
        ]),
        "hit_rates": lambda: runs(("lru", "specter"), **AXES | {"budget": ("6", "16", "32")}),
        "best_k": lambda: tuned_runs("published"),
        "planner": switched_runs,
        "planner_overlap": lambda: runs(("specter",), **AXES | {"budget": ("high", "32"), "k": (16, 47)}),
        "planner_texts": lambda: runs(("specter", "lru"), **AXES | {"sampling": ("seeded",), "prompt_tokens": (8, 16)}),
        "prompt_length": lambda: runs(SYSTEMS, **AXES | {"sampling": ("seeded",), "prompt_tokens": (16, 0)}),
        "decomposition": decomposed,
        "residual": lambda: residual_runs(model=("deepseek_v2_lite", "phi3_5_moe")),
        "payload_bits": lambda: residual_runs(charged_bits=(0.0, 7.2, 9.0)),
        "everything_fits": lambda: pd.concat([
            residual_runs(budget=("card",)), runs(("resident",), sampling=SAMPLINGS, budget=("card",))
        ]),
        "what_if": lambda: residual_runs(hardware=("a100_12gbps", "rtx4090_ddr4")),
        "probe": probe,
        "fidelity": fidelity,
        "lanes": lanes,
        "rounds/main": lambda: rounds(("specter", "lru"), budget=TIERS, sampling=SAMPLINGS, dataset=DATASETS),
        "rounds/timeline": lambda: rounds(("specter", "specmoeoff", "specter_plus", "lru"), dataset=DATASETS),
    }  # fmt: skip
    study = FIGURES[name] if name in FIGURES else TABLES[name]
    return {source: found[source]() for source in study.sources}


def data_of(name: str) -> tuple[pd.DataFrame, Frames]:
    frames = frames_of(name)
    return FIGURES[name].data(frames), frames


@pytest.mark.parametrize("name", figures("laptop"))
def test_a_figure_draws_its_data(name: str) -> None:
    if "-" in name:
        return  # the same figure of another model
    frames = frames_of(name)
    data, figure = FIGURES[name].data(frames), FIGURES[name].make(frames)
    drawn = [column for column in data if column in (
        "tpot_ms", "value", "speedup", "ms", "share", "geometric", "floor_trace_ms", "least", "greatest"
    )]  # fmt: skip
    assert drawn and len(data)
    assert not_drawn(figure, data[drawn].to_numpy(float).ravel()) == []
    below = [" ".join(text.get_text().split()) for text in figure.texts]
    assert any(re.search("narrow stand-ins? of DeepSeek-V2-Lite", words) for words in below)


def test_every_disagreement_stands_beside_a_figure_and_on_its_page() -> None:
    page = " ".join(Path("docs/disagreements.md").read_text().split())
    studies = "".join(path.read_text() for path in Path("harness/studies").glob("*.py"))
    sentences = {name: value for name, value in vars(disagreements).items() if name.isupper()}
    assert len(sentences) >= 7
    for name, sentence in sentences.items():
        assert sentence in page, name
        assert f"disagreements.{name}" in studies, name
    for path in re.findall(r"`(?:figures|paper_tables)/(\w+)/(\w+)\.(?:png|md)`", page):
        directory, name = path
        known = {"device." + name.removeprefix("h200_")} if directory == "device" else {name}
        assert known & {*FIGURES.names(), *TABLES.names()}, path


def test_every_figure_and_table_is_of_a_known_source() -> None:
    experiments = load_scale("laptop").experiments
    known = {*experiments, *(f"rounds/{name}" for name in experiments)}
    known |= {"lanes", "depth_profile", "probe", "fidelity", "decomposition",
             "transformers_offload", "claims", "best_k"}  # fmt: skip
    assert "best_k" not in experiments  # no scale runs it yet: it has not been run as a whole
    for registry in (FIGURES, TABLES):
        for name in registry.names():
            assert name.startswith("device.") or set(registry[name].sources) <= known
            assert registry[name].about or FIGURES[name].about  # of the figure with its name


def test_the_artifacts_table_is_what_the_studies_say() -> None:
    text = Path("docs/results.md").read_text()
    assert artifact.render(text) == text, "run python -m harness.artifact"
    assert "`figures/laptop/rivals.png`, `paper_tables/laptop/rivals.tex` | every rival" in text
    assert "`paper_tables/device/h200_rivals.tex` | every baseline" in text and "| 9 min |" in text


def test_tpot_is_a_mean_with_the_extent_of_its_inputs_and_a_floor() -> None:
    data, frames = data_of("tpot")
    frame = frames["main"]
    shown = [system for system in SYSTEMS if system != "on_demand"]
    assert len(data) == len(TIERS) * len(SAMPLINGS) * len(shown) * (len(DATASETS) + 1)
    for tier in TIERS:
        for system in shown:
            where: dict[str, Any] = {"sampling": "seeded", "system": system}
            source = where | ({} if system == "resident" else {"budget": tier, "policy": "same_bytes"})
            row = one(data, dataset="GSM8K", budget=tier, **where)
            times = values(frame, "tpot_ms", dataset="gsm8k", **source)
            assert row["tpot_ms"] == pytest.approx(fmean(times))
            assert (row["least"], row["greatest"]) == (min(times), max(times))
            floors = values(frame, "floor_trace_ms", dataset="gsm8k", **source)
            floor = fmean(floors) if system in ("specter", "lru") else np.nan
            assert row["floor_trace_ms"] == pytest.approx(floor, nan_ok=True)
            average = one(data, dataset="mean", budget=tier, **where)
            assert average["tpot_ms"] == pytest.approx(macro(frame, "tpot_ms", **source))
            assert np.isnan(average["least"])


def test_models_are_macro_averages_of_their_own() -> None:
    both = pd.concat([main_runs(), runs(SYSTEMS[:3], model=("qwen1_5_moe",), **AXES)])
    data = FIGURES["models"].data({"main": both})
    for model in ("deepseek_v2_lite", "qwen1_5_moe"):
        mine = data[(data["model"] == model) & data["budget"].str.startswith("low")]
        for system in SYSTEMS[:3]:
            row = one(mine, sampling="greedy", system=system)
            source = {"model": model, "sampling": "greedy", "system": system, "budget": "low", "policy": "same_bytes"}
            assert row["tpot_ms"] == pytest.approx(macro(both, "tpot_ms", **source))
            assert "K = 16" in row["panel"]
    assert "resident" not in set(data.loc[data["model"] == "qwen1_5_moe", "system"])


def test_a_speedup_is_the_baselines_time_over_ours() -> None:
    data, frames = data_of("speedup")
    frame = frames["main"]
    assert data["baseline"].unique().tolist() == ["specmoeoff", "mixtral_offloading", "lru"]
    assert data["policy"].unique().tolist() == ["published", "same_bytes"]
    cells = []
    for tier in TIERS:
        where: dict[str, Any] = {"budget": tier, "sampling": "greedy", "policy": "published"}
        theirs, ours = (
            {name: fmean(values(frame, "tpot_ms", system=system, dataset=name, **where)) for name in DATASETS}
            for system in ("specmoeoff", "specter")
        )
        row = one(data, baseline="specmoeoff", dataset="prose", **where)
        assert row["speedup"] == pytest.approx(theirs["prose"] / ours["prose"])
        cells.append(fmean(theirs[name] / ours[name] for name in DATASETS))
        average = one(data, baseline="specmoeoff", dataset="mean", **where)
        assert average["speedup"] == pytest.approx(cells[-1])
    row = one(TABLES["speedup"].build(frames).frame, policy="published residents", baseline="SpecMoEOff",
              sampling="greedy")  # fmt: skip
    assert (row["cells"], row["paper, mean"], row["paper, greatest"]) == ("2", 1.5, 1.88)
    assert (row["mean"], row["least"], row["greatest"]) == pytest.approx((fmean(cells), min(cells), max(cells)))
    assert np.isnan(one(TABLES["speedup"].build(frames).frame, policy="equal device bytes", baseline="SpecMoEOff",
                        sampling="greedy")["paper, mean"])  # fmt: skip


def test_the_finding_is_counted_from_the_runs() -> None:
    frame = main_runs()
    faster = {"system": "lru", "policy": "same_bytes", "budget": "low", "sampling": "seeded"}
    is_faster = pd.concat([frame[key] == value for key, value in faster.items()], axis=1).all(axis=1)
    frame.loc[frame["system"] == "lru", "tpot_ms"] = 1000.0
    frame.loc[is_faster, "tpot_ms"] = 0.5
    assert "LRU is faster than Specter in 1 of 4 cells" in finding({"main": frame})


def test_a_baseline_that_does_not_fit_says_so() -> None:
    frame = main_runs()
    misfit = (frame["system"] == "specmoeoff") & (frame["policy"] == "same_bytes") & (frame["budget"] == "low")
    frame.loc[misfit, "tpot_ms"] = np.nan
    figure = FIGURES["speedup"].make({"main": frame})
    said = [[text.get_text() for text in panel.texts].count("does not fit") for panel in figure.axes]
    assert said == [0, 2, 0, 0, 0, 0]
    table = one(TABLES["speedup"].build({"main": frame}).frame, policy="equal device bytes", baseline="SpecMoEOff",
                sampling="greedy")  # fmt: skip
    assert table["cells"] == "1"


def test_assumed_residents_are_named() -> None:
    frame = main_runs()
    taken = (frame["system"] == "specmoeoff") & (frame["policy"] == "published")
    frame.loc[taken, "assumes_residents"] = True
    frame.loc[frame["system"] == "lru", "residents_of"] = "mixtral_offloading"
    footer = " ".join(FIGURES["speedup"].caption({"main": frame})["footer"])
    assert "taken (conf/model): SpecMoEOff of DeepSeek-V2-Lite 16 / 4; LRU: those of Mixtral-Offloading." in footer


def test_absolute_times_stand_beside_the_papers() -> None:
    frames = frames_of("absolute")
    row = one(TABLES["absolute"].build(frames).frame, budget="low")
    where = {"system": "specter", "budget": "low", "policy": "published"}
    greedy = macro(frames["main"], "tpot_ms", sampling="greedy", **where)
    assert (row["greedy (ms)"], row["paper, v1 (ms)"]) == (pytest.approx(greedy), 99)
    assert row["greedy / paper"] == pytest.approx(greedy / 99)


@pytest.mark.parametrize("name", figures("laptop"))
def test_a_figure_with_values_of_the_paper_says_what_stand_ins_were_trained_for(name: str) -> None:
    if "-" in name:
        return
    frames = frames_of(name)
    figure = FIGURES[name].make(frames)
    drawn = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert (notes.TRAINED in FIGURES[name].caption(frames)["footer"]) == any("paper" in label for label in drawn)


def best_of(frame: pd.DataFrame, column: str = "tpot_ms", **where: Any) -> float:
    """`column` at the K of the least mean TPOT."""
    ks = sorted(set(values(frame, "k", **where)))
    return macro(frame, column, k=min(ks, key=lambda k: macro(frame, "tpot_ms", k=k, **where)), **where)


def test_residual_systems_are_shown_at_their_best_depth() -> None:
    data, frames = data_of("residual")
    frame = frames["residual"]
    assert len(data) == 2 * 2 * 2 * 6
    for name in ("lru", "specter_deadline_residual", "specter_plus"):
        where: dict[str, Any] = {"model": "phi3_5_moe", "budget": "low", "sampling": "seeded", "system": name}
        row = one(data, **where)
        assert row["tpot_ms"] == pytest.approx(best_of(frame, **where))
        assert row["floor_trace_ms"] == pytest.approx(best_of(frame, "floor_trace_ms", **where))
    ratios = [
        best_of(frame, system="lru", **cell) / macro(frame, "tpot_ms", system="specter_plus", **cell)
        for model in ("deepseek_v2_lite", "phi3_5_moe") for tier in TIERS for sampling in SAMPLINGS
        for cell in [{"model": model, "budget": tier, "sampling": sampling}]
    ]  # fmt: skip
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as LRU (mean {fmean(ratios):.2f})"
    assert spread in residual.finding(frames)


def test_the_map_names_the_fastest_system_of_each_cell_and_its_lead() -> None:
    data, frames = data_of("what_if")
    frame = frames["what_if"]
    assert len(data) == 2 * 2 * 2 * 2  # text, experts, machine, budget
    where = {"hardware": "rtx4090_ddr4", "budget": "low", "sampling": "seeded"}
    for side, codecs in (("16-bit experts", ("bf16",)), ("residual, too", ("bf16", "residual"))):
        systems = sorted({name for codec in codecs for name in values(frame, "system", codec=codec)})
        times = sorted((macro(frame, "tpot_ms", system=name, **where), name) for name in systems)
        row = one(data, side=side, **where)
        assert (row["system"], row["tpot_ms"]) == (times[0][1], pytest.approx(times[0][0]))
        assert row["lead"] == pytest.approx(times[1][0] / times[0][0])
    table = one(TABLES["what_if"].build(frames).frame, system="LRU", budget="low",
                hardware="RTX 4090, DDR4 desktop", sampling="seeded")  # fmt: skip
    fastest = min(macro(frame, "tpot_ms", system=name, **where) for name in set(values(frame, "system")))
    lru = macro(frame, "tpot_ms", system="lru", **where)
    assert (table["TPOT (ms)"], table["× the fastest"]) == pytest.approx((lru, lru / fastest))


def test_the_ablation_divides_each_step_by_the_next() -> None:
    frames = frames_of("residual_ablation")
    where: dict[str, Any] = {"model": "deepseek_v2_lite", "budget": "high", "sampling": "greedy"}
    row = one(TABLES["residual_ablation"].build(frames).frame, **where | {"model": "DeepSeek-V2-Lite"})
    steps = ("lru", "lru_residual", "specter_deadline_residual", "specter_plus")
    times = [best_of(frames["residual"], system=name, **where) for name in steps]
    assert [row[name] for name in residual.STEPS.values()] == pytest.approx(times)
    assert row["× residual"] == pytest.approx(times[0] / times[1])
    assert row["× and speculation"] == pytest.approx(times[1] / times[2])
    assert row["× and K by round"] == pytest.approx(times[2] / times[3])
    assert row["× in all"] == pytest.approx(times[0] / times[3])


def test_tables_of_residual_runs_keep_charged_rates_and_cards_apart() -> None:
    bits = frames_of("payload_bits")
    rows = TABLES["payload_bits"].build(bits).frame
    assert set(rows["system"]) == {"LRU, residual", "Specter, deadline + retain, residual", "Specter+"}
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    row, mine = one(rows, system="Specter+", **where), {"system": "specter_plus", **where}
    assert row["TPOT (ms)"] == pytest.approx(macro(bits["payload_bits"], "tpot_ms", charged_bits=0.0, **mine))
    assert row["at 7.2 bits (ms)"] == pytest.approx(macro(bits["payload_bits"], "tpot_ms", charged_bits=7.2, **mine))

    fits = frames_of("everything_fits")
    card = one(TABLES["everything_fits"].build(fits).frame, system="LRU", sampling="greedy")
    times = [macro(fits["everything_fits"], "tpot_ms", system=name, sampling="greedy") for name in ("resident", "lru")]
    assert card["resident / this"] == pytest.approx(times[0] / times[1])


def test_acceptance_is_in_per_cent_beside_the_papers() -> None:
    data, frames = data_of("acceptance")
    where: dict[str, Any] = {"budget": "high", "policy": "same_bytes", "system": "specter"}
    accepted = values(frames["main"], "acceptance", sampling="greedy", dataset="prose", **where)
    row = one(data, series="greedy", dataset="prose")
    assert row["value"] == pytest.approx(fmean(accepted) * 100)
    assert (row["least"], row["greatest"]) == pytest.approx((min(accepted) * 100, max(accepted) * 100))
    forced = values(frames["probe"], "value", quantity="acceptance", mode="teacher-forced")
    line = one(data, series="teacher-forced")
    assert line["value"] == pytest.approx(fmean(forced) * 100) and f"({fmean(forced) * 100:.1f})" in line["label"]
    assert "(96.6)" in one(data, series="paper, mean")["label"]
    assert "up to (99)" in one(data, series="paper, most")["label"]
    assert one(data, series="paper, mean")["value"] == pytest.approx(96.63)
    assert one(data, series="paper, most")["value"] == 99


def test_the_sweep_of_k_has_both_floors() -> None:
    data, frames = data_of("k_sweep")
    frame = frames["k_sweep"]
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    for k in (2, 8, 16):
        source = where | {"system": "specter", "k": k}
        times = [fmean(values(frame, "tpot_ms", dataset=name, **source)) for name in DATASETS]
        row = one(data, series="specter", k=k, **where)
        assert row["tpot_ms"] == pytest.approx(fmean(times)) and np.isnan(row["least"])  # of two data sets
        for floor in ("floor_trace", "floor_ideal"):
            expected = macro(frame, f"{floor}_ms", **source)
            assert one(data, series=floor, k=k, **where)["tpot_ms"] == pytest.approx(expected)
        tuned = macro(frame, "tpot_ms", **where | {"system": "specmoeoff_tuned", "k": k})
        assert one(data, series="specmoeoff_tuned", k=k, **where)["tpot_ms"] == pytest.approx(tuned)
    assert one(data, series="lru", **where)["tpot_ms"] == pytest.approx(macro(frame, "tpot_ms", system="lru", **where))
    assert one(data, series="published", **where)["k"] == published.DEPTH["deepseek_v2_lite"]


def test_the_sweep_of_budgets_is_over_what_specter_gets() -> None:
    data, frames = data_of("budget_sweep")
    frame = frames["budget_sweep"]
    for system in ("specter", "lru", "mixtral_offloading"):
        source: dict[str, Any] = {"system": system, "budget": "16"}
        row = one(data, quantity="tpot_ms", system=system, experts_per_layer=16.0)
        assert row["value"] == pytest.approx(macro(frame, "tpot_ms", **source))
        floor = np.nan if system == "mixtral_offloading" else macro(frame, "floor_trace_ms", **source)
        assert row["floor_trace_ms"] == pytest.approx(floor, nan_ok=True)
        hits = one(data, quantity="hit_rate", system=system, experts_per_layer=16.0)
        assert hits["value"] == pytest.approx(macro(frame, "hit_rate", **source) * 100)
    resident = one(data, system="resident")
    assert resident["quantity"] == "tpot_ms" and np.isnan(resident["experts_per_layer"])
    assert resident["value"] == pytest.approx(macro(frame, "tpot_ms", system="resident"))
    assert "on_demand" not in set(data.loc[data["quantity"] == "hit_rate", "system"])


def test_machines_show_the_systems_that_fit_them() -> None:
    frames = frames_of("hardware")
    frame = frames["hardware"]
    frame["fits_device"] = (frame["system"] != "resident") | (frame["hardware"] == "h200_pcie5")
    data = FIGURES["hardware"].data(frames)
    assert data["hardware"].unique().tolist() == ["A100 40 GB, PCIe 4.0", "H200, PCIe 5.0"]
    where: dict[str, Any] = {"hardware": "h200_pcie5", "system": "lru", "budget": "low"}
    row = one(data, **where | {"hardware": "H200, PCIe 5.0"})
    assert row["tpot_ms"] == pytest.approx(macro(frame, "tpot_ms", **where))
    assert np.isnan(one(data, hardware="A100 40 GB, PCIe 4.0", system="resident", budget="low")["tpot_ms"])


def test_rivals_are_macro_averages_by_policy() -> None:
    frames = frames_of("rivals")
    frame = frames["rivals"]
    frame.loc[(frame["system"] == "specmoeoff") & (frame["budget"] == "low"), "tpot_ms"] = np.nan
    data = FIGURES["rivals"].data(frames)
    where: dict[str, Any] = {"system": "lru", "budget": "low"}
    expected = macro(frame, "tpot_ms", policy="same_experts", **where)
    assert one(data, policy="equal experts", **where)["tpot_ms"] == pytest.approx(expected)
    misfit = FIGURES["rivals"].make(frames).axes[1]  # the panel of the budget low
    assert [text.get_text() for text in misfit.texts].count("does not fit") == 2


def test_prompt_lengths_show_times_over_the_mean_length() -> None:
    data, frames = data_of("prompt_length")
    frame = frames["prompt_length"]
    for quantity in ("ttft_ms", "tpot_ms", "end_to_end_ms"):
        source: dict[str, Any] = {"budget": "low", "system": "lru", "prompt_tokens": 0}
        length = fmean(values(frame, "num_prompt_tokens", **source))
        mine = data[(data["quantity"] == quantity) & np.isclose(data["num_prompt_tokens"], length)]
        assert one(mine, budget="low", system="lru")["value"] == pytest.approx(fmean(values(frame, quantity, **source)))


def test_parts_of_a_speedup_are_means_over_texts_and_are_stacked() -> None:
    data, frames = data_of("decomposition")
    for rival, hero in (("lru", "specter"), ("specmoeoff", "specter_deadline")):
        where: dict[str, Any] = {"budget": "high", "hero": hero, "rival": rival, "part": "misses"}
        expected = fmean(values(frames["decomposition"], "ms", **where))
        assert one(data, **where)["ms"] == pytest.approx(expected)
    figure = FIGURES["decomposition"].make(frames)
    sums = data.groupby(["budget", "hero", "rival"])["ms"].sum()
    assert not_drawn(figure, sums) == []  # the diamonds
    for panel in figure.axes:
        for bar in panel.patches:
            assert bar.get_y() * bar.get_height() >= 0  # type: ignore[attr-defined]  # away from zero


def test_fidelity_is_a_mean_over_texts_in_per_cent() -> None:
    data, frames = data_of("fidelity")
    frame, layers = frames["probe"], []
    for layer in (0, 1, 2):
        expected = fmean(values(frame, "value", quantity="fidelity", mode="seeded", layer=layer)) * 100
        assert one(data, mode="seeded", layer=layer)["value"] == pytest.approx(expected)
        layers.append(expected)
    assert one(data, mode="paper")["value"] == pytest.approx(96.33)
    rows = TABLES["fidelity"].build(frames).frame
    row = one(rows, text="seeded")
    found = (row["expert match, mean (%)"], row["worst layer (%)"], row["best layer (%)"])
    assert found == pytest.approx((fmean(layers), min(layers), max(layers)))
    for heading, quantity, scale in (("acceptance (%)", "acceptance", 100), ("distinct 4-grams", "distinct_4grams", 1)):
        assert row[heading] == pytest.approx(fmean(values(frame, "value", quantity=quantity, mode="seeded")) * scale)
    paper = one(rows, text="paper, real checkpoint")
    assert (paper["expert match, mean (%)"], paper["acceptance (%)"]) == pytest.approx((96.33, 99))


def test_unions_grow_from_one_token() -> None:
    data, frames = data_of("union")
    mean = {k: fmean(values(frames["probe"], "value", quantity="union", mode="seeded", k=k)) for k in (1, 2, 3, 16)}
    for k, value in mean.items():
        row = one(data, mode="seeded", k=k)
        assert (row["value"], row["growth"]) == pytest.approx((value, mean[16] / mean[1]))
    paper = one(data, mode="paper", k=16)
    assert (paper["value"], paper["growth"]) == (31.7, 5.29)
    rows = TABLES["union"].build(frames).frame
    assert rows["K"].tolist() == ["1", "2", "16"]
    row = one(rows, K="2")
    assert (row["seeded"], row["seeded ×"]) == pytest.approx((mean[2], mean[2] / mean[1]))
    row = one(rows, K="16")
    assert (row["paper, real checkpoint"], row["paper, real checkpoint ×"]) == (31.7, 5.29)
    assert one(rows, K="1")["paper, real checkpoint ×"] == 1


def test_runs_are_pooled_over_texts() -> None:
    data, frames = data_of("runs")
    frame = frames["probe"]
    counts = {k: sum(values(frame, "value", quantity="run", mode="seeded", k=k)) for k in (0, 2, 8)}
    total = sum(counts.values())
    shares = [sum(count for length, count in counts.items() if length >= n) / total for n in range(9)]
    seeded = data[data["mode"] == "seeded"]
    assert seeded["n"].tolist() == list(range(9)) and seeded["share"].tolist() == pytest.approx(shares)
    accepted = frame[(frame["quantity"] == "acceptance") & (frame["mode"] == "seeded")]
    alpha = sum(a * n for a, n in zip(accepted["value"], accepted["num"], strict=True)) / sum(accepted["num"])
    assert seeded["geometric"].tolist() == pytest.approx([alpha**n for n in range(9)])
    assert seeded["alpha"].iloc[0] == pytest.approx(alpha)
    assert seeded["expected"].iloc[0] == pytest.approx(alpha / (1 - alpha))
    row = one(TABLES["runs"].build(frames).frame, text="seeded")
    assert (row["acceptance α (%)"], row["E[A] = α/(1−α)"]) == pytest.approx((alpha * 100, alpha / (1 - alpha)))
    assert row["mean run"] == pytest.approx(sum(length * count for length, count in counts.items()) / total)
    assert (row["longest"], row["runs"]) == ("8", str(int(total)))
    assert row["K_max"] == str(seeded["deepest"].iloc[0])
    for heading, share in (("median run", 0.5), ("9 of 10 runs up to", 0.9)):
        assert row[heading] == str(min(k for k in counts if 1 - shares[k] + counts[k] / total >= share))


def test_methods_are_shown_along_layers_positions_and_margins() -> None:
    data, frames = data_of("methods")
    frame = frames["fidelity"].query("method == 'gptq'")
    rows = data[data["method"] == "gptq"]
    layers = [fmean(values(frame, "value", quantity="set_match", layer=layer)) * 100 for layer in (0, 1)]
    assert values(rows, "value", axis="layer") == pytest.approx([100 - share for share in layers])
    steps = frame[frame["quantity"] == "position"].to_dict("records")
    for first, middle in ((0, 4), (8, 12), (16, 20)):
        mine = [row for row in steps if first <= row["position"] < first + 8]
        weighted = sum(row["value"] * row["num"] for row in mine) / sum(row["num"] for row in mine)
        assert one(rows, axis="position", x=middle)["value"] == pytest.approx(100 - weighted * 100)
    bins = frame[frame["quantity"] == "margin"]
    margins = rows[rows["axis"] == "margin"]
    assert margins["x"].tolist() == bins["margin"].tolist()
    assert margins["value"].tolist() == pytest.approx((100 - bins["value"] * 100).tolist())
    row = one(TABLES["methods"].build(frames).frame, method="GPTQ, INT4")
    requests = [fmean(values(frame, "value", quantity="set_match", request=request)) * 100 for request in (0, 1)]
    expected = {
        "expert match (%)": fmean(layers),
        "paper, real checkpoint (%)": 96.33,
        "worst layer (%)": min(layers),
        "worst request (%)": min(requests),
        "whole set alike (%)": fmean(values(frame, "value", quantity="same_set")) * 100,
        "same rank (%)": fmean(values(frame, "value", quantity="order_match")) * 100,
        "same next token (%)": fmean(values(frame, "value", quantity="agreement")) * 100,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_leading_columns_name_the_rows() -> None:
    keys = {"main": 4, "models": 6, "systems": 4, "speedup": 3, "absolute": 2, "k_sweep": 4, "budget_sweep": 1,
            "hardware": 2, "rivals": 5, "memory": 5, "prompt_length": 3, "decomposition": 4, "published_ratio": 5,
            "fidelity": 2, "union": 2, "runs": 2, "methods": 2, "depth_profile": 3}  # fmt: skip
    for name, number in keys.items():
        assert TABLES[name].build(frames_of(name)).keys == number, name


def test_tables_of_runs_are_macro_averages() -> None:
    frame = main_runs()
    frame = frame[frame["policy"] == "same_bytes"]
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    systems = TABLES["systems"].build({"main": frame}).frame
    row = one(systems, system="Mixtral-Offloading", **where)
    source: dict[str, Any] = where | {"system": "mixtral_offloading"}
    needed = sum(macro(frame, f"num_{kind}", **source) for kind in ("hits", "late_hits", "misses"))
    expected = {
        "TPOT (ms)": macro(frame, "tpot_ms", **source),
        "TTFT (ms)": macro(frame, "ttft_ms", **source),
        "after 1st round (ms)": macro(frame, "tpot_after_first_round_ms", **source),
        "end to end (ms)": macro(frame, "end_to_end_ms", **source),
        "± 95 % (ms)": half_width(
            frame.query("system == 'mixtral_offloading' and budget == 'low'").query("sampling == 'seeded'"), "tpot_ms"
        ),
        "hits (%)": macro(frame, "num_hits", **source) / needed * 100,
        "late hits (%)": macro(frame, "num_late_hits", **source) / needed * 100,
        "misses (%)": macro(frame, "num_misses", **source) / needed * 100,
        "GB per token": macro(frame, "bytes_per_token", **source) / 1e9,
        "link busy (%)": macro(frame, "link_busy_frac", **source) * 100,
        "stall (ms)": macro(frame, "stall_ms", **source),
        "× floor_trace": macro(frame, "over_floor_trace", **source),
        "× floor_ideal": macro(frame, "over_floor_ideal", **source),
        "device (GB)": macro(frame, "device_total_bytes", **source) / 1e9,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    ours: dict[str, Any] = where | {"system": "specter"}
    glance = one(TABLES["models"].build({"main": frame}).frame, **where)
    assert glance["acceptance (%)"] == pytest.approx(macro(frame, "acceptance", **ours) * 100)
    assert glance["LRU (ms)"] == pytest.approx(macro(frame, "tpot_ms", system="lru", **where))
    assert glance["resident (ms)"] == pytest.approx(macro(frame, "tpot_ms", system="resident", sampling="seeded"))
    assert glance["× floor_trace"] == pytest.approx(macro(frame, "over_floor_trace", **ours))
    assert glance["experts per round"] == pytest.approx(macro(frame, "union_mean", **ours))
    assert glance["GB per token"] == pytest.approx(macro(frame, "bytes_per_token", **ours) / 1e9)
    assert (glance["K"], glance["experts per layer"], glance["texts"]) == ("16", "4", "10")
    mean = one(TABLES["main"].build({"main": frame}).frame, **where | {"data set": "mean"})
    assert mean["hits (%)"] == pytest.approx(macro(frame, "hit_rate", **ours) * 100)
    assert mean["acceptance (%)"] == pytest.approx(macro(frame, "acceptance", **ours) * 100)
    assert mean["after 1st round (ms)"] == pytest.approx(macro(frame, "tpot_after_first_round_ms", **ours))
    assert mean["on demand (ms)"] == pytest.approx(macro(frame, "tpot_ms", system="on_demand", **where))
    ratios = [
        fmean(values(frame, "tpot_ms", system="on_demand", dataset=name, **where))
        / fmean(values(frame, "tpot_ms", dataset=name, **ours))
        for name in DATASETS
    ]
    assert mean["× on demand"] == pytest.approx(fmean(ratios))
    assert mean["accepted per round"] == pytest.approx(macro(frame, "mean_accepted_len", **ours))
    assert mean["× floor_trace"] == pytest.approx(macro(frame, "over_floor_trace", **ours))


def test_tables_of_sweeps_divide_lru_by_ours() -> None:
    frame = k_runs()
    row = one(TABLES["k_sweep"].build({"k_sweep": frame}).frame, system="Specter", budget="low", sampling="seeded",
              K="8")  # fmt: skip
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    tpot = macro(frame, "tpot_ms", system="specter", k=8, **where)
    assert row["TPOT (ms)"] == pytest.approx(tpot)
    assert row["× LRU"] == pytest.approx(macro(frame, "tpot_ms", system="lru", **where) / tpot)
    assert row["floor_trace (ms)"] == pytest.approx(macro(frame, "floor_trace_ms", system="specter", k=8, **where))
    source: dict[str, Any] = where | {"system": "specter", "k": 8}
    expected = {
        "floor_ideal (ms)": macro(frame, "floor_ideal_ms", **source),
        "acceptance (%)": macro(frame, "acceptance", **source) * 100,
        "accepted per round": macro(frame, "mean_accepted_len", **source),
        "experts per layer": macro(frame, "union_mean", **source),
        "GB per token": macro(frame, "bytes_per_token", **source) / 1e9,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    frame = frames_of("hardware")["hardware"]
    row = one(TABLES["hardware"].build({"hardware": frame}).frame, hardware="H200, PCIe 5.0", budget="low")
    where = {"hardware": "h200_pcie5", "budget": "low"}
    lru, ours = (macro(frame, "tpot_ms", system=name, **where) for name in ("lru", "specter"))
    assert (row["LRU (ms)"], row["Specter (ms)"], row["× LRU"]) == pytest.approx((lru, ours, lru / ours))
    assert row["floor_trace of Specter (ms)"] == pytest.approx(
        macro(frame, "floor_trace_ms", system="specter", **where)
    )
    frame = frames_of("budget_sweep")["budget_sweep"]
    rows = TABLES["budget_sweep"].build({"budget_sweep": frame}).frame
    assert rows["experts per layer"].tolist() == ["2", "16", "64"]
    assert rows["LRU (ms)"].iloc[1] == pytest.approx(macro(frame, "tpot_ms", system="lru", budget="16"))


def test_the_table_of_rivals_divides_by_ours() -> None:
    frame = rival_runs()
    row = one(TABLES["rivals"].build({"rivals": frame}).frame, system="LRU", budget="low", policy="equal experts")
    where: dict[str, Any] = {"budget": "low", "policy": "same_experts"}
    lru = macro(frame, "tpot_ms", system="lru", **where)
    assert row["TPOT (ms)"] == pytest.approx(lru)
    source = where | {"system": "lru"}
    expected = {
        "after 1st round (ms)": macro(frame, "tpot_after_first_round_ms", **source),
        "TTFT (ms)": macro(frame, "ttft_ms", **source),
        "end to end (ms)": macro(frame, "end_to_end_ms", **source),
        "GB per token": macro(frame, "bytes_per_token", **source) / 1e9,
        "acceptance (%)": macro(frame, "acceptance", **source) * 100,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    for title, name in (("Specter", "specter"), ("Specter, deadline + retain", "specter_deadline")):
        assert row[f"× {title}"] == pytest.approx(lru / macro(frame, "tpot_ms", system=name, **where))
    mine = frame[(frame["system"] == "lru") & (frame["budget"] == "low") & (frame["policy"] == "same_experts")]
    shares = [
        one_run["num_misses"] / (one_run["num_hits"] + one_run["num_late_hits"] + one_run["num_misses"])
        for one_run in mine.to_dict("records")
    ]
    assert row["misses (%)"] == pytest.approx(fmean(shares) * 100)
    assert row["experts per layer"] == f"{PER_LAYER['low']:.1f}"
    memory = one(TABLES["memory"].build({"rivals": frame}).frame, system="LRU", budget="low", policy="equal experts")
    assert memory["slot (GB)"] == pytest.approx(mine["device_slot_bytes"].iloc[0] / 1e9)
    assert memory["all (GB)"] == pytest.approx(mine["device_total_bytes"].iloc[0] / 1e9)


def test_the_table_of_prompt_lengths_is_in_their_order() -> None:
    frame = frames_of("prompt_length")["prompt_length"]
    rows = TABLES["prompt_length"].build({"prompt_length": frame}).frame
    assert rows["prompt"].unique().tolist() == ["first 16", "whole"]
    where: dict[str, Any] = {"system": "lru", "budget": "low", "prompt_tokens": 0}
    row = one(rows, system="LRU", budget="low", prompt="whole")
    assert row["TTFT (ms)"] == pytest.approx(macro(frame, "ttft_ms", **where))
    assert row["end to end (ms)"] == pytest.approx(macro(frame, "end_to_end_ms", **where))
    assert row["TPOT (ms)"] == pytest.approx(macro(frame, "tpot_ms", **where))
    assert row["after 1st round (ms)"] == pytest.approx(macro(frame, "tpot_after_first_round_ms", **where))
    assert row["prompt tokens, mean"] == pytest.approx(macro(frame, "num_prompt_tokens", **where))


def test_the_best_depth_is_of_the_least_time_beside_the_cost_models() -> None:
    frame = k_runs().assign(acceptance=0.9, num_slots=416)
    unions = [
        {"mode": mode, "quantity": "union", "k": k, "value": value}
        for mode in SAMPLINGS for k, value in ((3, 12.0), (9, 24.0), (17, 34.0))
    ]  # fmt: skip
    probe = pd.DataFrame(unions).assign(model="deepseek_v2_lite")
    rows = TABLES["best_depth"].build({"k_sweep": frame, "probe": probe}).frame
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    by_k = {k: macro(frame, "tpot_ms", system="specmoeoff_tuned", k=k, **where) for k in (2, 8, 16)}
    row = one(rows, system="SpecMoEOff, tuned", **where)
    best = min(by_k, key=lambda k: by_k[k])
    assert (row["K tried"], row["best K"], row["TPOT (ms)"]) == ("2, 8, 16", str(best), pytest.approx(by_k[best]))
    assert row["TPOT at the paper's K (ms)"] == pytest.approx(by_k[16])
    assert row["TPOT there (ms)"] == pytest.approx(by_k[int(row["K of its cost model"])])
    assert np.isnan(one(rows, system="Specter", **where)["K of its cost model"])


def test_every_system_is_shown_at_the_k_of_main_and_at_its_best() -> None:
    """SpecMoEOff's best is over K and its plans, of the cell's own replays; ours are the same under either policy."""
    sweep = pd.concat([runs(("specter", "specter_deadline", "lru"), **AXES | {"input": (0,), "k": (8, 16, 47)}),
                       tuned_runs("same_bytes")])  # fmt: skip
    main = runs(("specter", "specter_deadline", "specmoeoff", "specmoeoff_tuned", "mixtral_offloading", "lru"),
                **AXES | {"input": range(2), "policy": ("published", "same_bytes")})  # fmt: skip
    published = tuned_runs("published")
    data = best_data({"main": main, "k_sweep": sweep, "best_k": published})
    for policy, source in (("published", published), ("same_bytes", sweep)):
        where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
        times = {
            (k, plans): macro(source, "tpot_ms", system=system, k=k, **where)
            for system, plans in (("specmoeoff_tuned", "with"), ("specmoeoff_no_plans", "without"))
            for k in (3, 16, 47)
        }
        row = one(data, system="specmoeoff_tuned", policy=policy, **where)
        best = min(times, key=lambda choice: times[choice])
        assert (row["best_k"], row["plans"], row["best_ms"]) == (*best, pytest.approx(times[best]))
        of_main = macro(main, "tpot_ms", system="specmoeoff_tuned", policy=policy, input=0, **where)
        assert (row["k"], row["tpot_ms"]) == (16, pytest.approx(of_main))
        ours = one(data, system="specter", policy=policy, **where)
        by_k = {k: macro(sweep, "tpot_ms", system="specter", k=k, **where) for k in (8, 16, 47)}
        assert (ours["best_ms"], ours["plans"]) == (pytest.approx(min(by_k.values())), "–")
        fixed = one(data, system="lru", policy=policy, **where)
        assert fixed["best_ms"] == fixed["tpot_ms"] and fixed["best_k"] == 0
    table = TABLES["best_k"].build({"main": main, "k_sweep": sweep, "best_k": published})
    assert (one(table.frame, system="Specter", policy="as published", **where)["× Specter at best"]) == 1


def test_switches_are_times_over_the_published_planner() -> None:
    data, frames = data_of("planner")
    frame = frames["planner"]
    where: dict[str, Any] = {"budget": "low", "sampling": "seeded"}
    assert data["switch"].unique().tolist() == list(SWITCHES.values())
    base = macro(frame, "tpot_ms", system="specter", execution="default", **where)
    late = macro(frame, "tpot_ms", system="specter_late", execution="default", **where)
    assert one(data, switch="late plan and eviction", **where)["value"] == pytest.approx(late / base)
    rows = TABLES["planner"].build(frames).frame
    mine = frame.query("system == 'specter_late' and budget == 'low' and sampling == 'seeded'")
    per_round = (mine["num_plans"] / mine["num_rounds"]).mean()
    assert one(rows, switch="late plan and eviction", **where)["plans per round"] == pytest.approx(per_round)


def test_the_experiment_of_the_planner_has_every_switch() -> None:
    runs_of_it = plan.experiment_runs("laptop", "planner", "deepseek_v2_lite", "gsm8k")
    assert {(c.system.name, c.execution.label or "default") for c in runs_of_it} == set(SWITCHES)


def test_the_plans_of_a_round_stand_beside_the_tokens_left_to_draft() -> None:
    frames = frames_of("planner_overlap")
    rows = TABLES["planner_overlap"].build(frames).frame
    mine = frames["planner_overlap"].query("budget == '32' and sampling == 'greedy' and k == 16")
    row = one(rows, budget="32", sampling="greedy", k="16")
    assert row["tokens left to draft"] == 13
    assert row["of Prefetch Overlap"] == pytest.approx((mine["num_overlap_plans"] / mine["num_rounds"]).mean())
    texts = TABLES["planner_texts"].build(frames_of("planner_texts")).frame
    assert set(texts.loc[texts["system"] == "Specter", "× Specter"]) == {1.0}


def test_the_table_of_parts_has_means_over_texts() -> None:
    frames = frames_of("decomposition")
    parts = frames["decomposition"]
    parts["rival_ms"] += parts["input"] * 10
    row = one(TABLES["decomposition"].build(frames).frame, budget="low", hero="Specter", rival="LRU")
    assert (row["K"], row["rival (ms)"], row["ours (ms)"]) == ("3 : 16", 95.0, 30.0)
    assert row["ratio"] == pytest.approx(95 / 30)
    where: dict[str, Any] = {"budget": "low", "hero": "specter", "rival": "lru"}
    for part, heading in (("tokens", "more tokens per round"), ("launches", "fewer launches")):
        assert row[heading] == pytest.approx(fmean(values(parts, "ms", part=part, **where)))
