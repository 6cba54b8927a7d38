"""transformers' models, which we did not write, filled with a checkpoint of ours. For tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from specter.models.checkpoint import Checkpoint
from specter.models.families.base import FAMILIES
from specter.models.hub_config import config_of
from specter.models.names import canonical
from specter.models.spec import ModelSpec


def build_oracle(spec: ModelSpec, config: dict[str, Any] | None = None) -> PreTrainedModel:
    """transformers' model of this configuration (by default the spec's), fp32, freshly initialised."""
    config = config or config_of(spec)
    model_class: Any = getattr(transformers, FAMILIES[spec.family].architecture)
    settings = model_class.config_class.from_dict({**config, "attn_implementation": "eager"})
    model = model_class(settings).float().eval()
    if spec.rope.short_factors:
        rotate_as_published(model)
    return model


def load_oracle(directory: Path, config: dict[str, Any] | None = None) -> PreTrainedModel:
    """transformers' model with the values of our (possibly int8-coded) checkpoint; strict. `config`: as in
    `build_oracle`."""
    checkpoint = Checkpoint.open(directory)
    spec = checkpoint.spec
    model = build_oracle(spec, config)
    state = {}
    for stored in model.state_dict():
        name = canonical(spec.family, stored)
        if ".mlp.experts." in name:
            layer = int(name.split(".")[2]) - spec.num_dense_layers
            state[stored] = checkpoint.experts(layer)[0 if "gate_up" in name else 1]
        elif name == "lm_head.weight" and spec.tied:
            state[stored] = checkpoint.tensor("model.embed_tokens.weight")
        else:
            state[stored] = checkpoint.tensor(name)
    model.load_state_dict(state, strict=True)
    return model


def rotate_as_published(model: PreTrainedModel) -> None:
    """Lets PhiMoE use the long factors beyond the original length, as the publisher's code does.

    transformers 5.17 picks them on every pass, and then recomputes and uses the short ones.
    """
    rotary = model.model.rotary_emb
    rotary.rope_init_fn = lambda config: (rotary.inv_freq, rotary.attention_scaling)


class RouterLog:
    """Collects the expert ids of every router call, in order of layers."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[np.ndarray] = []
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(lambda _module, _args, output: self.calls.append(output[2].numpy()))


def greedy_oracle(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens, cache, fed = [], None, prompt
    with torch.inference_mode():
        for _ in range(num_tokens):
            result = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            tokens.append(int(result.logits[0, -1].argmax()))
            fed = tokens[-1:]
    return tokens
