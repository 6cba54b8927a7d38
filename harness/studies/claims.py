"""The paper's claims, published beside reproduced. The numbers come from the job `check`, which reads claims.yaml."""

from __future__ import annotations

import pandas as pd

from harness.plotting.frames import Frames
from harness.plotting.tables import Table
from harness.studies.registry import table


def claim_rows(checked: pd.DataFrame) -> pd.DataFrame:
    """Claims as tables show them: what is published and measured, with the verdict."""
    return pd.DataFrame(
        {
            "id": checked["id"],
            "claim": checked["sentence"],
            "published": checked["published"],
            "measured": checked["measured"],
            "expected here": checked["expected"].replace("", "–"),
            "unit": checked["unit"].replace("", "–"),
            "from": checked["from"],
            "verdict": checked["status"],
        }
    )


@table("claims", "claims", minutes=20, about="every number of the paper beside what was measured here, with a verdict")
def claims_table(frames: Frames) -> Table:
    checked = frames["claims"]
    published = checked[checked["published"].notna()]
    kinds = " and ".join(sorted(checked["checkpoint_kind"].unique()))
    what = (
        "NOT COMPARABLE: measured on a stand-in, while the paper's number is of a real checkpoint. NOT RUN: nothing "
        "here or at this scale measures it. A device reference is a record kept in data/reference/, not a run of this "
        "scale. Every claim, those of this repository too, with experiment, hardware and tolerance: claims.yaml and "
        "check.md."
    )
    stated = {"checkpoint": kinds}
    return Table("Claims of the paper, published beside reproduced", claim_rows(published), 2, [what], stated)
