"""`specter quantize`: the INT4 draft and the residual experts of a checkpoint, where `specter generate` finds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from specter.cli.choice import Choice, find_model, useful_threads
from specter.quantize import cli as int4
from specter.quantize import gptq_format
from specter.quantize.residual import __main__ as residual
from specter.quantize.residual import directory as residual_directory


def quantize(
    choice: Choice, console: Console, *, method: str, calibration: Path | None, with_residual: bool, device: str | None
) -> None:
    """Makes what is missing; an interrupted run resumes.

    Raises SpecterError: as `specter.quantize` and its `residual`.
    """
    model = find_model(choice.model, console)
    codes, blobs = choice.int4 or Path(model.quantized), choice.residual or Path(model.residual)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    threads = useful_threads(Path(model.checkpoint))
    if (codes / gptq_format.REPORT_FILE).is_file():
        console.print(f"the INT4 draft exists in {codes}")
    else:
        options = int4.Options(
            Path(model.checkpoint), codes, method=method, tokenizer=model.tokenizer, device=where, threads=threads
        )
        int4.run(options if calibration is None else replace(options, calibration=calibration))
        console.print(f"INT4 draft written to {codes}")
    if not with_residual:
        return
    if (blobs / residual_directory.REPORT_FILE).is_file():
        console.print(f"the residual experts exist in {blobs}")
    else:
        residual.encode(
            residual.Encode(
                checkpoint=Path(model.checkpoint), quantized=codes, out=blobs, device=where, threads=threads
            )
        )
        console.print(f"residual experts written to {blobs}")
