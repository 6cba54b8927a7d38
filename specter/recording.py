"""Record once, replay everywhere.

Losslessness means that budget, planner, system and machine change no token. So one live run per (model, draft, prompt,
K, sampling) records tokens and routing, and all other runs are the same engine over a `ReplayModel` that returns them.

A *dense* recording has a draft of K tokens from every position of the text, made by committing one token a round
(`accept.FirstToken`). It serves rounds of any K up to its own: a shorter draft is the beginning of a longer one, and
a row of a target pass does not depend on the rows after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from specter.errors import SpecterError
from specter.files import replacing
from specter.models.base import Choose, DraftStep, FinishedStep, Model, Output, Proposal, Routing, TargetPass
from specter.records import Generation

NO_TOKEN = -1  # the target's token after a rejected draft: never read
NO_EXPERT = -1  # routing that the host does not see
DENSE = "dense"  # key of `Recording.meta`
CHECKSUM = "sha256"  # key in a file: a flipped bit would change tables silently


@dataclass(slots=True)
class RecordedPass:
    """One target pass and the draft steps before it."""

    position: int
    tokens: list[int]  # inputs: last committed token, then the drafts (prefill: the prompt)
    draft_routing: NDArray[np.int16]  # [draft_len, MoE layers, top_k]
    target_routing: NDArray[np.int16]  # [MoE layers, rows, top_k]
    new_tokens: list[int]  # committed by the pass
    predicted: NDArray[np.int16] | None = None  # [MoE layers - 1, rows, top_k], of passes without drafts


@dataclass(slots=True)
class Recording:
    """One live run: prefill first, then one pass per round."""

    passes: list[RecordedPass]
    meta: dict[str, str]  # its origin: model and draft digests, sampling, K, data set, input, threads

    @property
    def prompt(self) -> list[int]:
        return self.passes[0].tokens

    @property
    def is_dense(self) -> bool:
        """Whether every position of the text has a draft: each pass commits one token, also where it drafted."""
        return DENSE in self.meta

    @property
    def has_routing(self) -> bool:
        """Whether the target's routing was recorded; in resident passes it stays on the device."""
        return bool((self.passes[0].target_routing >= 0).all())

    @property
    def tokens(self) -> list[int]:
        """All generated tokens, prefill's first included."""
        return [token for one in self.passes for token in one.new_tokens]

    def save(self, path: Path) -> None:
        """Writes a safetensors file whole or not at all."""
        arrays: dict[str, NDArray[np.generic]] = {}
        for index, one in enumerate(self.passes):
            arrays[f"{index}.tokens"] = np.array(one.tokens, np.int32)
            arrays[f"{index}.new_tokens"] = np.array(one.new_tokens, np.int32)
            arrays[f"{index}.draft_routing"] = one.draft_routing
            arrays[f"{index}.target_routing"] = one.target_routing
            if one.predicted is not None:
                arrays[f"{index}.predicted"] = one.predicted
        positions = json.dumps([one.position for one in self.passes])
        checksum = _checksum(arrays, positions)
        with replacing(path) as part:
            save_file(arrays, part, metadata={**self.meta, "positions": positions, CHECKSUM: checksum})

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Reads a file of `save`. Raises SpecterError naming the file if it is not one, or if its content changed."""
        try:
            with safe_open(path, framework="np") as file:
                meta = dict(file.metadata() or {})
            arrays = load_file(path)
            stated = meta.pop("positions")
            if meta.pop(CHECKSUM, "") != _checksum(arrays, stated):
                raise ValueError("its content does not have its checksum, or it is of an older version")
            positions = json.loads(stated)
            passes = [
                RecordedPass(
                    position,
                    arrays[f"{index}.tokens"].tolist(),
                    arrays[f"{index}.draft_routing"],
                    arrays[f"{index}.target_routing"],
                    arrays[f"{index}.new_tokens"].tolist(),
                    arrays.get(f"{index}.predicted"),
                )
                for index, position in enumerate(positions)
            ]
        except (SafetensorError, KeyError, OSError, ValueError) as error:
            raise SpecterError(f"{path} is not a recording: {error}", "delete it: it will be made anew") from None
        return cls(passes, meta)


def _checksum(arrays: Mapping[str, NDArray[np.generic]], positions: str) -> str:
    """SHA-256 of all arrays by name, and of the positions."""
    digest = hashlib.sha256(positions.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


class RecordingModel:
    """A `Model` that records what another one returns; see `finish`.

    Args:
        predicts: record the next layer's predicted routing in every pass without drafts, also where the engine does not
            request it, so that one recording serves every baseline. For a model that computes at once, at no charge.
    """

    def __init__(self, model: Model, predicts: bool = False) -> None:
        self._model = model
        self._predicts = predicts
        self.num_layers, self.num_dense_layers = model.num_layers, model.num_dense_layers
        self.num_experts, self.top_k = model.num_experts, model.top_k
        self.reset()

    def reset(self) -> None:
        self._model.reset()
        self._passes: list[RecordedPass] = []
        self._steps: list[DraftStep] = []  # since the last pass

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        self._steps = []
        self._model.begin_draft(token, position, choose)

    def draft_step(self) -> DraftStep:
        step = self._model.draft_step()
        self._steps.append(step)
        return step

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        num_moe_layers = self.num_layers - self.num_dense_layers
        shape = (0, num_moe_layers, self.top_k)
        # The engine has waited for the last step. Stacking copies.
        drafts = np.stack([step.routing for step in self._steps]) if self._steps else np.empty(shape, np.int16)
        routing = np.full((num_moe_layers, len(tokens), self.top_k), NO_EXPERT, np.int16)
        inner = self._model.target_pass(tokens, position, num_outputs)
        predicts = self._predicts and not self._steps
        self._steps = []
        self._passes.append(RecordedPass(position, list(tokens), drafts, routing, []))
        return _RecordingPass(inner, self._passes[-1], self.num_dense_layers, predicts)

    def crop(self, length: int) -> None:
        self._model.crop(length)

    def finish(self, generation: Generation, meta: dict[str, str]) -> Recording:
        """The recording of this model's last generation."""
        ends = np.cumsum([1, *(record.new_len for record in generation.rounds)]).tolist()
        for one, start, end in zip(self._passes, [0, *ends], ends, strict=False):
            one.new_tokens = generation.tokens[start:end]
        return Recording(self._passes, meta)


class _RecordingPass:
    """Copies a layer's routing when the layer combines: the engine has waited for it by then."""

    def __init__(self, inner: TargetPass, record: RecordedPass, num_dense_layers: int, predicts: bool) -> None:
        self._inner, self._record = inner, record
        self._num_dense_layers = num_dense_layers
        self._predicts = predicts
        self._routing: Routing | None = None  # of the current layer
        self._predicted: Routing | None = None  # of the next layer
        self.decode, self.run_experts, self.outputs = inner.decode, inner.run_experts, inner.outputs

    def attend_and_route(self, layer: int) -> Routing | None:
        self._routing = self._inner.attend_and_route(layer)
        if self._predicts and 0 <= layer - self._num_dense_layers < len(self._record.target_routing) - 1:
            self.predict_next(layer)
        return self._routing

    def predict_next(self, layer: int) -> Routing:
        if self._predicted is None:
            self._predicted = self._inner.predict_next(layer)
        return self._predicted

    def combine(self, layer: int) -> None:
        assert self._routing is not None
        moe_layer = layer - self._num_dense_layers
        self._record.target_routing[moe_layer] = self._routing
        if self._predicted is not None:
            if self._record.predicted is None:
                self._record.predicted = np.empty_like(self._record.target_routing[:-1])
            self._record.predicted[moe_layer] = self._predicted
            self._predicted = None
        self._inner.combine(layer)


class ReplayModel:
    """A `Model` over recordings; its outputs are tokens, for `TokenSampler`. The prompt of a prefill (a pass at
    position 0) selects the recording. Calls that were not recorded raise SpecterError.

    Attributes:
        played: the passes of this generation.
    """

    def __init__(self, recordings: Sequence[Recording], num_dense_layers: int, num_experts: int) -> None:
        if not all(recording.has_routing for recording in recordings):
            raise SpecterError("not recorded: the routing of resident passes", "record another system")
        num_moe_layers, _, self.top_k = recordings[0].passes[0].target_routing.shape
        self.num_layers, self.num_dense_layers = num_dense_layers + num_moe_layers, num_dense_layers
        self.num_experts = num_experts
        self._by_prompt = {tuple(recording.prompt): recording for recording in recordings}
        self.reset()

    def reset(self) -> None:
        self.played: list[RecordedPass] = []
        self._recording: Recording | None = None
        self._num_drafted = 0

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        one = self._pass(position)
        self._drafting = one
        if token != one.tokens[0] or position != one.position:
            self._refuse(f"a draft from token {token} at position {position}")

    def draft_step(self) -> FinishedStep:
        one = self._drafting
        index = self._num_drafted
        drafts = one.tokens[1:]
        if index >= len(drafts):
            self._refuse(f"draft step {index} at position {one.position + index}")
        self._num_drafted += 1
        return FinishedStep(Proposal(drafts[index]), one.draft_routing[index])

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        if position == 0:
            self._recording = self._by_prompt.get(tuple(tokens))
        one = self._pass(position)
        if self._recording is not None and self._recording.is_dense:
            one = _first_rows(one, len(tokens), self._recording)
        if list(tokens) != one.tokens or position != one.position:
            self._refuse(f"a pass over {len(tokens)} tokens at position {position}")
        self.played.append(one)
        self._num_drafted = 0
        outputs = [*one.new_tokens, *[NO_TOKEN] * (num_outputs - len(one.new_tokens))]
        return _ReplayPass(one.target_routing, one.predicted, outputs, self.num_dense_layers)

    def crop(self, length: int) -> None:
        pass

    def _pass(self, position: int) -> RecordedPass:
        """The recorded pass at `position`; without a dense recording, the next one."""
        recording, index = self._recording, len(self.played)
        if recording is not None and recording.is_dense and position:
            index = position - len(recording.prompt) + 1
        if recording is None or index >= len(recording.passes):
            self._refuse(f"a pass at position {position}")
        return recording.passes[index]

    def _refuse(self, what: str) -> NoReturn:
        raise SpecterError(f"not recorded: {what}", "record the run with this prompt, K and sampling first")


def _first_rows(one: RecordedPass, num_rows: int, recording: Recording) -> RecordedPass:
    """A pass of a dense recording as it would have been with `num_rows` - 1 drafts; a prefill stays whole."""
    if one.position == 0:
        return one
    drafts, text = one.tokens[1:num_rows], recording.tokens[one.position - len(recording.prompt) + 1 :]
    num_accepted = next((i for i, draft in enumerate(drafts) if draft != text[i]), len(drafts))
    return RecordedPass(
        one.position,
        one.tokens[:num_rows],
        one.draft_routing[: num_rows - 1],
        one.target_routing[:, :num_rows],
        text[: num_accepted + 1],
    )


@dataclass(frozen=True, slots=True)
class _ReplayPass:
    routing: NDArray[np.int16]
    predicted: NDArray[np.int16] | None
    tokens: list[int]
    num_dense_layers: int

    def attend_and_route(self, layer: int) -> Routing | None:
        return None if layer < self.num_dense_layers else self.routing[layer - self.num_dense_layers]

    def predict_next(self, layer: int) -> Routing:
        if self.predicted is None:
            raise SpecterError(
                "not recorded: predictions of the next layer", "record plain decoding of this prompt first"
            )
        predicted: NDArray[np.int16] = self.predicted[layer - self.num_dense_layers]
        return predicted

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pass

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pass

    def combine(self, layer: int) -> None:
        pass

    def outputs(self) -> list[Output]:
        return list(self.tokens)
