"""The finished part of a quantization on disk, from which a killed run resumes.

`.NAME.partial` beside the output directory holds each finished layer's tensors (under their final name) and report, and
the calibration states that enter the next layer. It belongs to one checkpoint, text, set of options and state of the
code (its origin); any other run starts from the beginning.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.files import check_free, replacing, write_whole
from specter.quantize.activations import WalkState

_ORIGIN, _STATES = "origin", "states.safetensors"


class Workspace:
    """
    Attributes:
        directory: where the tensors are until `publish`.
        layers: the report of every finished MoE layer, in order.
    """

    def __init__(self, out: Path, origin: str) -> None:
        """Opens the workspace of an earlier run with the same `origin`, or an empty one.

        Raises SpecterError: `out` is in use, or cannot be written.
        """
        check_free(out)
        self._out = out
        self.directory = out.parent / f".{out.name}.partial"
        try:
            mark = self.directory / _ORIGIN
            if not mark.is_file() or mark.read_text() != origin:
                shutil.rmtree(self.directory, ignore_errors=True)
                self.directory.mkdir(parents=True)
                mark.write_text(origin)
        except OSError as error:
            raise SpecterError(
                f"{out} cannot be written ({error.strerror})", "give an out=DIR that is writable"
            ) from None
        self.layers: list[dict[str, Any]] = []
        while (path := self._report(len(self.layers))).is_file():
            self.layers.append(json.loads(path.read_text()))

    def start(self, device: torch.device | str) -> WalkState | None:
        """The state from which the walk over the calibration text resumes; None at the beginning."""
        path = self.directory / _STATES
        if not path.is_file():
            return None
        with safe_open(path, framework="pt", device=str(device)) as file:
            states = [file.get_tensor(str(index)) for index in range(len(list(file.keys())))]
            return WalkState(int(file.metadata()["layer"]), states)

    def add(self, file: str, tensors: dict[str, Tensor], report: dict[str, Any], after: WalkState) -> None:
        """Saves one more layer. The tensors are written before the report, so a report implies whole tensors."""
        save_file(tensors, self.directory / file)
        write_whole(self._report(len(self.layers)), json.dumps(report))
        self.layers.append(report)
        with replacing(self.directory / _STATES) as part:
            save_file({str(i): x.cpu() for i, x in enumerate(after.states)}, part, metadata={"layer": str(after.layer)})

    def publish(self) -> None:
        """Makes the workspace the finished directory."""
        for path in (self.directory / _ORIGIN, self.directory / _STATES, *self.directory.glob("layer-*.json")):
            path.unlink(missing_ok=True)
        os.replace(self.directory, self._out)

    def discard_if_empty(self) -> None:
        """Removes the workspace if no layer is finished."""
        if not self.layers:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _report(self, number: int) -> Path:
        return self.directory / f"layer-{number}.json"
