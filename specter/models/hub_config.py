"""Reads a hub `config.json` as a `ModelSpec` and writes it; families register their parts (see `families.base`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specter.errors import SpecterError
from specter.files import read_object
from specter.models.families.base import FAMILIES, IGNORED, Config, Family, Values, check_settings
from specter.models.spec import ModelSpec, RopeSpec

# Fields of `ModelSpec` and their keys in every family's config.json; the latter may be absent.
_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "top_k": "num_experts_per_tok",
    "num_heads": "num_attention_heads",
}
_DEFAULTED = {"norm_eps": "rms_norm_eps", "max_positions": "max_position_embeddings", "tied": "tie_word_embeddings"}
_OWN = "specter_"  # name and source of a full-size configuration
_READ = {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}  # by `rope_settings`
_SUPPORTED: Values = {
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False, True),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (False,),
}


def read_spec(directory: Path) -> ModelSpec:
    """The spec of a checkpoint directory, named after it. Raises SpecterError as `spec_of`, or for a damaged file."""
    config = read_object(
        directory / "config.json", "give a checkpoint directory in hub format, with its own config.json"
    )
    return spec_of(config, directory.name)


def spec_of(config: Config, name: str) -> ModelSpec:
    """The spec that a hub configuration describes. Settings are checked here, before any tensor is read.
    Raises SpecterError: an unregistered family, a missing key, or a setting that the decoder does not implement."""
    model_type = config.get("model_type", "")
    if model_type not in FAMILIES:
        known = ", ".join(f"{kind} ({FAMILIES[kind].published})" for kind in FAMILIES.names())
        raise SpecterError(
            f"{name}: model_type {config.get('model_type')!r} is not supported", f"use a checkpoint of {known}"
        )
    family = FAMILIES[model_type]
    config = family.defaults | config
    try:
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "an unknown method")
            raise SpecterError(
                f"{name}: the checkpoint is quantised already ({method})",
                f"use the 16-bit one ({family.published}); the draft is made from it by python -m specter.quantize",
            )
        check_settings(
            {key: value for key, value in config.items() if not key.startswith(_OWN)},
            known_keys(family),
            {**_SUPPORTED, **family.supported},
            where=f"{name}: config.json",
            remedy=family.published,
        )
        fields = {field: config[key] for field, key in {**_KEYS, **family.keys}.items()}
        defaulted = {field: config[key] for field, key in _DEFAULTED.items() if key in config}
        fields |= {field: type(getattr(ModelSpec, field))(value) for field, value in defaulted.items()}
        fields |= family.read(config, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecterError(
            f"{name}: config.json has a value of the wrong type: {error}", "use the checkpoint's own config.json"
        ) from None
    except KeyError as missing:
        raise SpecterError(
            f"{name}: config.json lacks {missing}", "use the config.json that came with the checkpoint"
        ) from None
    spec = ModelSpec(name=name, family=model_type, **fields | {"rope": RopeSpec(**fields["rope"])})
    _check_sizes(spec, family)
    return spec


def config_of(spec: ModelSpec) -> Config:
    """The hub configuration of a spec; `spec_of` reads it back unchanged."""
    family = FAMILIES[spec.family]
    return {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **{key: getattr(spec, field) for field, key in {**_KEYS, **_DEFAULTED, **family.keys}.items()},
        "hidden_act": "silu",
        "rope_theta": spec.rope.theta,
        **family.write(spec),
    }


def known_keys(family: type[Family]) -> frozenset[str]:
    """The keys of config.json that are read or cannot change logits; those in `supported` come on top."""
    honoured = {*_KEYS.values(), *_DEFAULTED.values(), *family.keys.values(), *family.read_keys, *_READ}
    return IGNORED | family.ignored | honoured


def _check_sizes(spec: ModelSpec, family: type[Family]) -> None:
    may_be_zero = family.may_be_zero | {"num_dense_layers"} | (set() if spec.num_dense_layers else {"dense_inter"})
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        least = 0 if field.name in may_be_zero else 1
        if field.type == "int" and (type(value) is not int or value < least):
            raise SpecterError(f"{spec.name}: config.json gives {field.name} as {value!r}", "give a whole number")
    if not 1 <= spec.top_k <= spec.num_experts:
        raise SpecterError(
            f"{spec.name}: config.json selects {spec.top_k} of {spec.num_experts} experts",
            "num_experts_per_tok must be between 1 and the number of routed experts",
        )
    group_size, rest = divmod(spec.num_experts, spec.num_groups)
    if rest or not spec.top_groups <= spec.num_groups or spec.top_k > spec.top_groups * group_size:
        raise SpecterError(
            f"{spec.name}: {spec.top_k} experts from {spec.top_groups} of {spec.num_groups} groups of "
            f"{spec.num_experts} experts",
            "n_group must divide the experts, and topk_group groups must hold enough of them",
        )
    if not spec.is_latent and (spec.num_heads % spec.num_kv_heads or spec.rope_dim % 2):
        raise SpecterError(
            f"{spec.name}: {spec.num_heads} heads over {spec.num_kv_heads} keys of {spec.rope_dim} channels",
            "num_key_value_heads must divide num_attention_heads, and head_dim must be even",
        )
