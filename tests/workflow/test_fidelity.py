"""The fidelity study: against the engine's own draft, and its measures on routing written by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from harness import scales
from harness.catalogue import FIGURES, TABLES
from harness.jobs.fidelity import Options, Request, evenly, measure, rows, side_by_side
from harness.plotting import tables
from harness.plotting.charts import save
from harness.studies import published
from specter.arguments import parse_arguments
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.live import LiveModel
from specter.probes.fidelity import Followed, Study, Texts, order_match, set_match, study, window_mask
from specter.probes.teacher import force
from specter.quantize.layer import LayerExperts
from tests.helpers import FAMILIES, TINY, open_live, quantize, write_random


def texts(num: int, length: int, first: int) -> Texts:
    tokens = torch.randint(0, TINY.vocab, (num, length), generator=torch.Generator().manual_seed(3))
    return Texts(tokens, torch.full((num,), length), first)


def test_a_draft_sees_the_targets_keys_before_its_window_and_its_own_within() -> None:
    mask = window_mask(8, first=2, window=3)
    assert mask.shape == (8, 16)
    assert mask[4].nonzero().flatten().tolist() == [0, 1, 8 + 2, 8 + 3, 8 + 4]  # the last of the first window
    assert mask[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 8 + 5]
    assert mask.any(1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_engines_draft_does(tmp_path: Path, family: str) -> None:
    """Same routing and choices as draft steps and verification passes on the live decoder, token by token."""
    spec = FAMILIES[family]
    write_random(tmp_path, spec)
    live, window = open_live(tmp_path), 6
    experts = quantize(spec, live.store)

    def draft(layer: int, target: LayerExperts) -> LayerExperts:
        return LayerExperts(*(getattr(experts, name).dequantize()[layer] for name in ("gate", "up", "down")))

    given = texts(2, 6 * window, first=window)
    result = study(Checkpoint.open(tmp_path), {"int4": draft}, given, window)
    for index, tokens in enumerate(given.tokens.tolist()):
        forced = force(LiveModel(live.decoder, live.store, {}), tokens, window)
        mine = result.drafts["int4"]
        same_target = (result.target.routing[index].numpy() == forced.target_routing).mean()
        same_draft = (mine.routing[index].numpy() == forced.draft_routing).mean()
        assert same_target > 0.998 and same_draft > 0.998  # rounding may turn a near tie
        assert (forced.draft_routing != forced.target_routing).mean() > 0.01  # the draft is one that errs
        agrees = (mine.choices[index] == result.target.choices[index]).numpy()
        assert (agrees == forced.agrees).mean() > 0.97


def test_the_targets_own_experts_route_alike(tmp_path: Path) -> None:
    write_random(tmp_path)
    given = texts(3, 20, first=4)
    result = study(Checkpoint.open(tmp_path), {"same": lambda layer, target: target}, given, window=5)
    same = result.drafts["same"]
    assert result.target.routing.shape == (3, 16, TINY.num_moe_layers, TINY.top_k)
    assert (set_match(same.routing, result.target.routing) == 1).float().mean() > 0.99
    assert (same.choices == result.target.choices).float().mean() > 0.97
    assert result.margins.shape == (3, 16, TINY.num_moe_layers) and bool((result.margins >= 0).all())


def test_padding_changes_nothing_before_it(tmp_path: Path) -> None:
    write_random(tmp_path)
    whole, lengths = texts(2, 24, first=4), torch.tensor([24, 12])
    padded = whole.tokens.clone()
    padded[1, 12:] = 0
    drafts = {"same": lambda layer, target: target}
    one, two = (study(Checkpoint.open(tmp_path), drafts, Texts(t, lengths, 4), 5) for t in (whole.tokens, padded))
    assert torch.equal(one.target.routing[1, :8], two.target.routing[1, :8])
    assert Texts(padded, lengths, 4).is_real().sum(1).tolist() == [20, 8]


def test_matches_by_hand() -> None:
    target, draft = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 9]])
    assert set_match(draft, target).item() == pytest.approx(2 / 3) and order_match(draft, target).item() == 0
    np.testing.assert_allclose(order_match(torch.tensor([[1, 9, 3]]), target), 2 / 3)


def test_texts_without_a_drafted_position_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path)
    with pytest.raises(SpecterError, match="position 10"):
        study(Checkpoint.open(tmp_path), {}, texts(2, 10, first=10), 5)


# -- the job: rows, tables, figures ----------------------------------------------------------------


def made_up() -> pd.DataFrame:
    """Two requests of two data sets, the second shorter; two layers, top-2; two methods, one of them exact."""
    target = torch.tensor([[0, 1], [2, 3]], dtype=torch.int16).expand(2, 3, 2, 2)
    wrong = target.clone()
    wrong[0, 0, 0] = torch.tensor([1, 5])  # one of two experts alike, none in its rank
    wrong[1, 2] = 9  # padding: must not count
    choices = torch.tensor([[1, 2, 3], [4, 5, 6]])
    other = choices.clone()
    other[1, 1] = 0
    margins = torch.arange(12.0).view(2, 3, 2)
    result = Study(
        Followed(target, choices), margins, {"gptq": Followed(wrong, other), "q8_0": Followed(target, choices)}
    )
    found = [Request("seeded", "gsm8k", [0] * 4), Request("seeded", "prose", [0] * 3)]
    named: dict[str, Any] = {"model": "m", "checkpoint_kind": "standin", "charged_as": "deepseek_v2_lite", "window": 16}
    return rows(result, found, side_by_side(found, 1)).assign(**named, num_requests=2, num_pairs=4)


def test_rows_are_means_over_real_positions() -> None:
    frame = made_up().query("method == 'gptq'").set_index(["quantity", "request", "layer"])["value"]
    assert frame["set_match", 0, 0] == pytest.approx((0.5 + 1 + 1) / 3) and frame["set_match", 0, 1] == 1
    assert frame["order_match", 0, 0] == pytest.approx(2 / 3) and frame["same_set", 0, 0] == pytest.approx(2 / 3)
    assert frame["set_match", 1, 0] == 1
    assert frame["agreement", 1, -1] == 0.5 and frame["agreement", 0, -1] == 1


def test_positions_and_margins_leave_padding_out() -> None:
    frame = made_up().query("method == 'gptq'")
    positions = frame[frame["quantity"] == "position"]
    assert positions["num"].tolist() == [2, 2, 1] and positions["value"].tolist() == [pytest.approx(0.875), 1, 1]
    bins = frame[frame["quantity"] == "margin"]
    assert bins["num"].sum() == 10 and bins["margin"].is_monotonic_increasing and bins["margin"].max() < 10
    assert bins["value"].iloc[0] == 0.5  # the least margin is where the experts differ


def test_the_methods_table_states_pairs_and_stands_beside_the_paper() -> None:
    table = TABLES["methods"].build({"fidelity": made_up()})
    by_method = table.frame.set_index("method")
    assert by_method.loc["GGUF Q8_0", "expert match (%)"] == 100
    assert by_method.loc["GPTQ, INT4", "paper, real checkpoint (%)"] == pytest.approx(96.33)
    assert by_method.loc["GPTQ, INT4", "worst layer (%)"] == pytest.approx(100 * (2.5 / 3 + 1) / 2)
    for write in tables.FORMATS.values():
        assert "4 request" in write(table) and "narrow stand-in" in write(table)


def made_up_probe() -> pd.DataFrame:
    """One model, three modes, with known runs and unions."""
    rows: list[dict[str, object]] = []
    for mode in ("greedy", "seeded", "teacher-forced"):
        rows += [{"mode": mode, "quantity": "fidelity", "layer": layer, "value": 0.9 + layer / 100} for layer in (0, 1)]
        rows += [
            {"mode": mode, "quantity": "run", "k": k, "value": count} for k, count in ((0, 1.0), (2, 2.0), (8, 1.0))
        ]
        rows += [{"mode": mode, "quantity": "union", "k": k, "value": v} for k, v in ((1, 6.0), (16, 30.0))]
        rows += [{"mode": mode, "quantity": "acceptance", "value": 0.75, "num": 16}]
        rows += [{"mode": mode, "quantity": "distinct_4grams", "value": 1.0}]
    named: dict[str, Any] = {
        "model": "m",
        "checkpoint_kind": "standin",
        "charged_as": "deepseek_v2_lite",
        "dataset": "gsm8k",
    }
    return pd.DataFrame([{"layer": -1, "k": 0, "num": 4, "temperature": 1.0} | named | row for row in rows])


def test_runs_and_growth_in_their_tables() -> None:
    probe = {"probe": made_up_probe()}
    greedy = TABLES["runs"].build(probe).frame.set_index("text").loc["greedy"]
    assert greedy["E[A] = α/(1−α)"] == pytest.approx(3) and greedy["K_max"] == "4"
    assert greedy["mean run"] == pytest.approx(3) and (greedy["median run"], greedy["longest"]) == ("2", "8")
    union = TABLES["union"].build(probe).frame.set_index("K").loc["16"]
    assert union["greedy ×"] == pytest.approx(5) and union["paper, real checkpoint ×"] == pytest.approx(5.29)


def test_probe_figures_can_be_drawn(tmp_path: Path) -> None:
    frames = {"probe": made_up_probe(), "fidelity": made_up()}
    for name in ("methods", "runs", "fidelity", "union", "fidelity_spread"):
        save(FIGURES[name].make(frames), [tmp_path / f"{name}.png"])
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("methods=hqq", "hqq"),
        ("texts=spoken", "spoken"),
        ("datasets=nothing", "nothing"),
        ("prompt_tokens=144", "longer than 144"),
        ("texts=recorded", "manifests="),
        ("quantized=nowhere/gptq", "nowhere"),
        ("window=wide", "window=wide is not a whole number"),
        ("windows=3", "windows=3"),
        ("probe=desktop", "desktop"),
        ("model=llama", "llama"),
        ("device=cuda", "no CUDA GPU"),
    ],
)
def test_a_bad_study_is_refused(override: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["model=deepseek_v2_lite", "texts=datasets", "datasets=gsm8k", "methods=gptq", "num_requests=1", override]
    with pytest.raises(SpecterError, match=fault):
        measure(parse_arguments(Options, given))


def test_options_replace_values_of_the_probe() -> None:
    given = parse_arguments(Options, ["model=qwen1_5_moe", "probe=smoke", "methods=rtn,q2_k", "window=7"])
    expected, methods = scales.load_probe("smoke"), cast(Any, ("rtn", "q2_k"))  # a tuple on a command line
    assert given.study() == dataclasses.replace(expected, methods=methods, window=7)
    assert parse_arguments(Options, ["model=m", "probe=smoke"]).study() == expected


def test_every_scale_has_a_study() -> None:
    for path in Path("conf/scale").glob("*.yaml"):
        assert scales.load_probe(path.stem).name == path.stem


def test_requests_of_a_short_data_set_are_made_up_for_by_the_others() -> None:
    """The paper's 1,000 requests, although HumanEval has 164."""
    sizes = {"gsm8k": 1000, "wikitext2": 1000, "humaneval": 164, "gpqa": 198, "c4": 1000}
    found = [Request("data set", name, [index]) for name, size in sizes.items() for index in range(size)]
    kept = Counter(one.dataset for one in evenly(found, 1000))
    assert kept == {"humaneval": 164, "gpqa": 198, "gsm8k": 213, "wikitext2": 213, "c4": 212}
    assert len(evenly(found[:50], 1000)) == 50
    assert [one.tokens for one in evenly(found, 3)] == [[0], [0], [0]]


def test_the_study_at_scale_paper_asks_for_the_papers_requests() -> None:
    assert scales.load_probe("paper").total_requests == published.FIDELITY_REQUESTS


def test_spread_states_the_least_values() -> None:
    """Instances, layers and requests of one method, by hand from the rows."""
    frame = made_up()
    rows = TABLES["fidelity_spread"].build({"fidelity": frame}).frame
    for level, keys in (("instance", ["request", "layer"]), ("layer", ["layer"]), ("request", ["request"])):
        mine = frame[(frame["quantity"] == "set_match") & (frame["method"] == frame["method"].iloc[0])]
        values = mine.groupby(keys)["value"].mean() * 100
        row = rows[rows["values by"] == level].iloc[0]
        assert row["values"] == str(len(values))
        assert row["least"] == pytest.approx(values.min()) and row["mean"] == pytest.approx(values.mean())
