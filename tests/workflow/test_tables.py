"""Tables and figures from a handful of made-up runs whose averages are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.catalogue import FIGURES, TABLES
from harness.plotting import tables
from harness.plotting.charts import save, whiskers
from harness.plotting.frames import extent, half_width, spread_budgets
from harness.plotting.notes import caveats, fidelity_line, probe_line, provenance
from harness.studies.decomposition import PARTS as SPEEDUP_PARTS
from specter.errors import SpecterError
from specter.memory import PARTS

TPOT = {("specter", "gsm8k"): (10.0, 30.0), ("specter", "prose"): (40.0, 40.0), ("lru", "gsm8k"): (60.0, 60.0),
        ("lru", "prose"): (40.0, 40.0), ("resident", "gsm8k"): (5.0, 5.0), ("resident", "prose"): (5.0, 5.0),
        ("on_demand", "gsm8k"): (80.0, 80.0), ("on_demand", "prose"): (80.0, 80.0)}  # fmt: skip


def run(system: str, dataset: str, index: int, tpot_ms: float) -> dict[str, object]:
    speculative = system == "specter"
    numbers = ("tpot_after_first_round_ms", "ttft_ms", "end_to_end_ms", "union_mean", "num_hits", "num_late_hits",
               "num_misses", "hit_rate", "bytes_per_token", "link_busy_frac", "stall_ms", "over_floor_trace",
               "over_floor_ideal", "device_total_bytes", "floor_ideal_ms")  # fmt: skip
    return dict.fromkeys(numbers, 1.0) | {
        "model": "deepseek_v2_lite", "checkpoint_kind": "standin", "charged_as": "deepseek_v2_lite", "system": system,
        "speculative": speculative, "uses_budget": system != "resident", "budget": "high",
        "policy": "same_bytes", "fits_budget": True, "dataset": dataset,
        "codec": "bf16", "charged_bits": 0.0, "is_auto": False,
        "sampling": "seeded", "temperature": 0.7, "hardware": "a100_40gb_pcie4", "k": 16 if speculative else 0,
        "input": index, "repeat": 0, "prompt_tokens": 16, "max_new_tokens": 128, "clock": "virtual",
        "distinct_4grams": 0.95, "experts_per_layer": 16.0,
        "fits_without_offloading": True, "fits_device": True, "device_draft_bytes": 7.4e9,
        "assumes_residents": False, "residents_of": system,
        "tpot_ms": tpot_ms, "floor_trace_ms": 4.0,
        "acceptance": 0.9 if speculative else None, "mean_accepted_len": 8.0 if speculative else None,
    }  # fmt: skip


@pytest.fixture
def runs() -> pd.DataFrame:
    rows = [run(*key, index, value) for key, values in TPOT.items() for index, value in enumerate(values)]
    return pd.DataFrame(rows)


def test_speedup_is_a_ratio_of_means_and_the_average_is_over_data_sets(runs: pd.DataFrame) -> None:
    frame = TABLES["main"].build({"main": runs}).frame.set_index("data set")
    assert frame.loc["GSM8K", "Specter (ms)"] == pytest.approx(20.0)
    assert frame.loc["GSM8K", "× LRU"] == pytest.approx(3.0)
    assert frame.loc["mean", "× LRU"] == pytest.approx((3.0 + 1.0) / 2)
    assert frame.loc["mean", "Specter (ms)"] == pytest.approx(30.0)


def test_tables_keep_models_apart(runs: pd.DataFrame) -> None:
    other = runs.assign(model="phi3_5_moe", charged_as="phi3_5_moe", tpot_ms=runs["tpot_ms"] * 3, k=runs["k"] // 2)
    both = pd.concat([runs, other])
    table = TABLES["main"].build({"main": both})
    frame = table.frame[table.frame["data set"] == "mean"].set_index("model")
    assert frame["Specter (ms)"].tolist() == pytest.approx([30.0, 90.0])
    assert frame.index.tolist() == ["DeepSeek-V2-Lite", "Phi-3.5-MoE"] and table.keys == 5
    assert "narrow stand-in of Phi-3.5-MoE" in table.stated["checkpoint"]
    alike = [note for note in table.notes if "Systems have equal device bytes" in note]
    assert len(alike) == 1 and not alike[0].startswith("DeepSeek")  # what holds for both is said once
    assert any(note.startswith("Phi-3.5-MoE: ") for note in table.notes)
    one = TABLES["main"].build({"main": runs})
    assert "model" not in one.frame
    glance = TABLES["models"].build({"main": both}).frame
    assert glance["Specter (ms)"].tolist() == pytest.approx([30.0, 90.0]) and glance["K"].tolist() == ["16", "8"]


@pytest.fixture
def unequal(runs: pd.DataFrame) -> pd.DataFrame:
    """One model on two data sets of two inputs, two models on one input of one, with fewer systems."""
    part = runs[(runs["dataset"] == "gsm8k") & (runs["input"] == 0) & (runs["system"] != "on_demand")]
    others = [part.assign(model=name, charged_as=name) for name in ("phi3_5_moe", "qwen1_5_moe")]
    return pd.concat([runs, *others], ignore_index=True)


def test_models_of_unequal_data_sets_are_told_apart(runs: pd.DataFrame, unequal: pd.DataFrame) -> None:
    counts = "2 data sets × 2 inputs (DeepSeek-V2-Lite), 1 data set × 1 input (Qwen1.5-MoE and Phi-3.5-MoE) × 1 repeat"
    assert counts in provenance(unequal)
    table = TABLES["models"].build({"main": unequal})
    caption = FIGURES["models"].caption({"main": unequal})
    for words in (" ".join(table.notes), " ".join(caption["footer"])):
        assert counts in words and "over each model's own data sets" in words
    generated = unequal.drop(columns="sampling").assign(
        mode="seeded", quantity="set_match", num_requests=1, num_pairs=1, window=8
    )
    datasets = "2 data sets (DeepSeek-V2-Lite), 1 data set (Qwen1.5-MoE and Phi-3.5-MoE);"
    for line in (probe_line, fidelity_line):
        assert datasets in line(generated)
        assert " 2 data sets; " in line(generated[generated["model"] == "deepseek_v2_lite"])


def test_a_looping_text_is_one_models(unequal: pd.DataFrame) -> None:
    shares = unequal["charged_as"].map({"deepseek_v2_lite": 0.99, "qwen1_5_moe": 0.5, "phi3_5_moe": 0.25})
    told = caveats(unequal.assign(distinct_4grams=shares))[-1]
    assert "seeded text of Qwen1.5-MoE and Phi-3.5-MoE repeats itself" in told
    assert "0.50 (Qwen1.5-MoE), 0.25 (Phi-3.5-MoE)" in told
    assert "seeded text repeats itself (distinct 4-grams 0.50)" in caveats(unequal.assign(distinct_4grams=0.5))[-1]


def test_frames_without_a_model_in_common_are_named(runs: pd.DataFrame) -> None:
    with pytest.raises(SpecterError, match="no model is in all of k_sweep, probe"):
        TABLES["best_depth"].build({"k_sweep": runs, "probe": runs.assign(model="phi3_5_moe")})


def test_a_sweep_shows_the_systems_that_a_model_runs(runs: pd.DataFrame) -> None:
    figure = FIGURES["k_sweep"].make({"k_sweep": runs})
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "Specter" in named and "SpecMoEOff, tuned" not in named
    tuned = runs[runs["system"] == "specter"].assign(system="specmoeoff_tuned")
    figure = FIGURES["k_sweep"].make({"k_sweep": pd.concat([runs, tuned])})
    assert "SpecMoEOff, tuned" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_format_states_the_protocol(runs: pd.DataFrame) -> None:
    table = TABLES["main"].build({"main": runs})
    for write in tables.FORMATS.values():
        text = write(table)
        assert "virtual" in text and "narrow stand-in of DeepSeek-V2-Lite" in text and "0.7" in text
    assert r"\_" in tables.to_latex(table) and "×" not in tables.to_latex(table)


def test_systems_without_a_budget_stand_beside_every_budget(runs: pd.DataFrame) -> None:
    low = runs[runs["uses_budget"]].assign(budget="low")
    spread = spread_budgets(pd.concat([runs, low]))
    assert set(spread.loc[spread["system"] == "resident", "budget"]) == {"high", "low"}


def test_caveats_name_a_looping_text_and_a_model_that_fits(runs: pd.DataFrame) -> None:
    assert len(caveats(runs)) == 2
    assert "equal device bytes" in caveats(runs)[1] and "7.4 GB" in caveats(runs)[1]
    assert "distinct 4-grams 0.50" in caveats(runs.assign(distinct_4grams=0.5))[2]
    beyond = runs.assign(fits_device=runs["system"] != "resident")
    assert caveats(beyond)[2] == "resident (all on GPU) does not fit A100 40 GB, PCIe 4.0."
    assert "2 data sets × 2 inputs" in provenance(runs)


def test_every_footer_says_whether_eos_ends_a_text(runs: pd.DataFrame) -> None:
    assert "; 128 new tokens, EOS ignored; " in provenance(runs)
    assert "; at most 128 new tokens, ended by EOS; " in provenance(runs.assign(ignore_eos=False))


def test_whiskers_reach_from_the_least_to_the_greatest_input() -> None:
    rows = pd.DataFrame({"a": [2.0, 5.0], "least": [1.0, 5.0], "greatest": [4.0, 5.0]})
    np.testing.assert_array_equal(whiskers(rows, "a"), [[1.0, np.nan], [2.0, np.nan]])
    assert whiskers(rows[["a"]], "a") is None


def test_the_depth_profile_names_the_best_k_beside_the_papers() -> None:
    times = {2: (30.0, 50.0), 8: (20.0, 50.0), 16: (34.0, 36.8), 32: (60.0, 60.0)}  # by K: of two data sets
    rows = [run("specter", "ab"[i], 0, pair[i]) | {"k": k} for k, pair in times.items() for i in (0, 1)]
    table = TABLES["depth_profile"].build({"k_sweep": pd.DataFrame([*rows, run("lru", "a", 0, 1.0)])})
    (row,) = table.frame.to_dict("records")
    assert (row["best K"], row["TPOT (ms)"]) == ("8", 35.0)
    assert row["within 2 % of it"] == "8, 16" and row["paper's K"] == "16"
    assert row["TPOT at the paper's K (ms)"] == pytest.approx(35.4)


def test_equal_figures_are_equal_files(runs: pd.DataFrame, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(FIGURES["tpot"].make({"main": runs}), [tmp_path / f"{name}.png", tmp_path / f"{name}.pdf"])
    for suffix in ("png", "pdf"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_half_width_is_students_over_inputs_within_data_sets() -> None:
    inputs = [*range(5), *range(5)]
    frame = pd.DataFrame(
        {"dataset": ["a"] * 5 + ["b"] * 5, "input": inputs, "x": [1.0, 2.0, 3.0, 4.0, 5.0] + [10.0] * 5}
    )
    assert half_width(frame, "x") == pytest.approx(2.306 * np.sqrt(2.5 / 5) / 2)  # variance 2.5 over 5 inputs, and 0
    assert np.isnan(half_width(frame.iloc[1:], "x"))  # four inputs of a data set
    assert half_width(pd.concat([frame, frame]), "x") == half_width(frame, "x")  # a repeat is no further input


def test_four_inputs_have_no_extent() -> None:
    frame = pd.DataFrame({"dataset": ["a"] * 5 + ["b"] * 5, "input": [*range(5), 0, 1, 2, 3, 3], "x": [*range(1, 11)]})
    found = extent(frame, ["dataset"], "x")
    assert found.loc["a"].to_dict() == {"least": 1, "greatest": 5}
    assert np.isnan(found.loc["b"].to_numpy(float)).all()


def test_what_does_not_fit_is_a_row_without_numbers(runs: pd.DataFrame) -> None:
    runs = runs[runs["uses_budget"]].assign(**{f"device_{part}_bytes": 1e9 for part in PARTS}, policy="published")
    runs.loc[runs["system"] == "lru", ["fits_budget", "tpot_ms"]] = [False, np.nan]
    for name in ("rivals", "memory"):
        frame = TABLES[name].build({"rivals": runs}).frame.set_index("system")
        assert frame.loc["LRU", "experts per layer"] == "does not fit"
        assert frame.loc["Specter", "experts per layer"] == "16.0"
    assert TABLES["rivals"].build({"rivals": runs}).frame.set_index("system")["TPOT (ms)"].isna()["LRU"]
    save(FIGURES["rivals"].make({"rivals": runs}), [])


def parts(rival: str, hero: str, **values: object) -> list[dict[str, object]]:
    named = {"model": "deepseek_v2_lite", "rival": rival, "hero": hero,
             "rival_k": 0, "hero_k": 16, "policy": "same_bytes", "budget": "high",
             "hardware": "a100_40gb_pcie4", "dataset": "gsm8k", "input": 0, "rival_ms": 60.0,
             "hero_ms": 30.0}  # fmt: skip
    return [named | {"part": part, "ms": 6.0} | values for part in SPEEDUP_PARTS]


def test_a_speed_up_is_shown_with_its_parts(runs: pd.DataFrame) -> None:
    frames = {"main": runs, "decomposition": pd.DataFrame(parts("lru", "specter"))}
    row = TABLES["decomposition"].build(frames).frame.iloc[0]
    assert (row["ratio"], row["K"]) == (2.0, "– : 16")
    assert sum(row[title] for title, _ in SPEEDUP_PARTS.values()) == row["rival (ms)"] - row["ours (ms)"]
    save(FIGURES["decomposition"].make(frames), [])


def test_the_published_ratio_stands_beside_ours(runs: pd.DataFrame) -> None:
    misfit = parts("specmoeoff", "specter", policy="published", part=None, ms=np.nan)[:1]
    explained = pd.DataFrame([*parts("specmoeoff", "specter", rival_k=3), *misfit])
    frame = TABLES["published_ratio"].build({"main": runs, "decomposition": explained}).frame
    assert frame["K"].tolist() == ["3 : 16", "does not fit"]
    assert set(frame["published, mean"]) == {1.5} and set(frame["published, most"]) == {1.88}
