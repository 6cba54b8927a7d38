"""The base of a model family: its config.json and its tensor names.

`specter.models.hub_config` reads and writes config.json through these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.registry import Registry

Config = dict[str, Any]
Rules = tuple[tuple[str, str], ...]  # regular expressions and their replacements, applied in order


class Family:
    """Base of a family; the name under which a subclass is registered is its `model_type` on the hub.

    Attributes:
        architecture: the class name in config.json.
        published: a checkpoint of this family, named in error messages.
        keys: the key in config.json of fields of `ModelSpec` that are copied as they are.
        supported: the values of config.json that the decoder implements, by key (None: absent).
        may_be_zero: fields of `ModelSpec` that may be 0 besides `num_dense_layers`; the default is of plain heads.
        from_hub: renames a tensor of a file; several file layouts may map to one of Specter's names.
        to_hub: renames a tensor to the publisher's name.
    """

    architecture: str
    published: str
    keys: ClassVar[Mapping[str, str]] = {}
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    may_be_zero: frozenset[str] = frozenset({"nope_dim", "kv_lora", "shared_inter"})
    from_hub: Rules = ()
    to_hub: Rules = ()

    @staticmethod
    def read(config: Config, name: str) -> Config:
        """Fields of `ModelSpec` that are neither shared nor in `keys`; `rope` as a dict of `RopeSpec` fields.
        Raises SpecterError: a setting that the decoder does not implement."""
        raise NotImplementedError

    @staticmethod
    def write(spec: ModelSpec) -> Config:
        """The inverse of `read`: entries of config.json."""
        raise NotImplementedError


FAMILIES: Registry[type[Family]] = Registry("model_type")


def rope_settings(config: Config, name: str, kinds: tuple[str, ...], theta: float) -> tuple[str, Config]:
    """The kind of rotary embedding, and its settings with `rope_theta` (`theta` if config.json gives none).
    Raises SpecterError: a kind that is none of `kinds`."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        raise SpecterError(f"{name}: rope type {kind!r} is not implemented", f"use a checkpoint with {kinds}")
    chosen = scaling.get("rope_theta") or config.get("rope_theta") or theta
    return kind, {**scaling, "rope_theta": float(chosen)}


def grouped_heads(config: Config) -> Config:
    """Head dimensions of a family whose heads have keys and values of their own."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return {"nope_dim": 0, "rope_dim": head_dim, "v_dim": head_dim, "kv_lora": 0, "num_kv_heads": num_kv_heads}
