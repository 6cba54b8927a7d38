"""Texts by temperature: distances and ratios of the committed records, against numbers computed here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.catalogue import FIGURES, TABLES
from harness.studies import published

FRAME = pd.read_parquet(Path("data/reference/virtual/temperatures.parquet"))
DEEPSEEK = FRAME[(FRAME["charged_as"] == published.DEEPSEEK) & (FRAME["temperature"] == 0)]


def test_distances_are_relative_deviations_from_the_papers_values() -> None:
    rows = TABLES["device.temperatures"].build({"temperatures": FRAME}).frame
    row = rows[(rows["model"] == "DeepSeek-V2-Lite") & (rows["T"] == "0")].iloc[0]
    alpha = DEEPSEEK[DEEPSEEK["quantity"] == "acceptance"]["value"].mean()
    hits = DEEPSEEK[DEEPSEEK["quantity"] == "hit_rate"].groupby("k")["value"].mean()
    off = [abs(hits[slots] / rate - 1) * 100 for slots, rate in ((6, 0.292), (16, 0.509), (32, 0.766))]
    assert row["off: acceptance (%)"] == pytest.approx(abs(alpha / 0.99 - 1) * 100)
    assert row["off: LRU hits (%)"] == pytest.approx(np.mean(off))
    assert row["off: sum"] == pytest.approx(
        sum(row[f"off: {what} (%)"] for what in ("acceptance", "union", "LRU hits"))
    )


def test_the_map_draws_times_over_those_of_lru() -> None:
    study = FIGURES["device.lru_map"]
    data = study.data({"temperatures": FRAME})
    drawn = data[(data["model"] == published.DEEPSEEK) & (data["system"] == "specter") & (data["tier"] == "high")]
    times = DEEPSEEK[(DEEPSEEK["quantity"] == "tpot_ms") & (DEEPSEEK["tier"] == "high")]
    by_system = times.pivot_table(index="dataset", columns="system", values="value")
    expected = (by_system["specter"] / by_system["lru"]).to_dict()
    assert drawn[drawn["temperature"] == 0].set_index("dataset")["ratio"].to_dict() == pytest.approx(expected)
    assert drawn["ratio"].isna().sum() == 1  # the paper's point
    study.make({"temperatures": FRAME})
