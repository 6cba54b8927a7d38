"""The base of a model family: its config.json and its tensor names.

`specter.models.hub_config` reads and writes config.json through these classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.registry import Registry

Config = dict[str, Any]
Rules = tuple[tuple[str, str], ...]  # regular expressions and their replacements, applied in order
Values = Mapping[str, tuple[Any, ...]]  # the values that are implemented, by key

# Keys of any family's config.json that cannot change the logits of a pass: metadata, training, generation (which is
# configured by Specter's own settings), classification heads.
_METADATA = ("architectures", "model_type", "auto_map", "transformers_version", "_name_or_path", "name_or_path")
_HEADS = ("id2label", "label2id", "problem_type", "num_labels", "output_router_logits", "router_aux_loss_coef")
_CALLS = ("output_hidden_states", "output_attentions", "return_dict", "use_cache", "chunk_size_feed_forward")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_TRAINING = ("initializer_range", "attention_dropout")
IGNORED = frozenset((*_METADATA, *_HEADS, *_CALLS, *_TOKENS, *_TRAINING, "torch_dtype", "dtype", "_commit_hash"))
# Keys of the rotary settings besides those of the kind.
_ROPE = frozenset({"rope_type", "type", "rope_theta"})
_ROPE_SUPPORTED: Values = {"partial_rotary_factor": (None, 1.0)}


class Family:
    """Base of a family; the name under which a subclass is registered is its `model_type` on the hub.

    Attributes:
        architecture: the class name in config.json.
        published: a checkpoint of this family, named in error messages.
        keys: the key in config.json of fields of `ModelSpec` that are copied as they are.
        read_keys: further keys that `read` converts.
        supported: keys of which the decoder implements these values only.
        ignored: keys that cannot change the logits of a pass, besides `IGNORED`. A key in no group is refused.
        defaults: values of absent keys, where transformers' config class differs from `ModelSpec`.
        may_be_zero: fields of `ModelSpec` that may be 0 besides `num_dense_layers`; the default is of plain heads.
        from_hub: renames a tensor of a file; several file layouts may map to one of Specter's names.
        to_hub: renames a tensor to the publisher's name.
    """

    architecture: str
    published: str
    keys: ClassVar[Mapping[str, str]] = {}
    read_keys: frozenset[str] = frozenset({"head_dim", "num_key_value_heads"})
    supported: ClassVar[Values] = {}
    ignored: frozenset[str] = frozenset()
    defaults: ClassVar[Config] = {}
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


def check_settings(settings: Config, known: Collection[str], supported: Values, *, where: str, remedy: str) -> None:
    """Raises SpecterError for the first key that is neither known nor in `supported`, or has a value not listed there.
    Unknown keys may be null."""
    for key, value in settings.items():
        if key in supported and value not in supported[key]:
            allowed = " or ".join(repr(allowed) for allowed in supported[key])
            raise SpecterError(
                f"{where} has {key}={value!r}, which is not implemented", f"use a checkpoint with {allowed} ({remedy})"
            )
        if key not in known and key not in supported and value is not None:
            raise SpecterError(
                f"{where} has {key}={value!r:.60}, a key that Specter does not implement",
                f"use another checkpoint ({remedy}); remove the key if it cannot change the model's logits",
            )


def rope_settings(
    config: Config, name: str, kinds: Mapping[str, Collection[str]], theta: float, supported: Values | None = None
) -> tuple[str, Config]:
    """The kind of rotary embedding, and its settings with `rope_theta` (`theta` if config.json gives none).

    Args:
        kinds: the keys that are read, by kind.
        supported: further keys of which these values only are implemented.
    Raises:
        SpecterError: a kind that is none of `kinds`, or a key or a value that is not implemented.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        raise SpecterError(f"{name}: rope type {kind!r} is not implemented", f"use a checkpoint with {tuple(kinds)}")
    check_settings(
        scaling,
        _ROPE.union(kinds[kind]),
        {**_ROPE_SUPPORTED, **(supported or {})},
        where=f"{name}: rope_scaling in config.json",
        remedy="the published settings of its family",
    )
    outer, inner = (settings.get("original_max_position_embeddings") for settings in (config, scaling))
    if outer is not None and inner is not None and outer != inner:
        raise SpecterError(
            f"{name}: config.json gives original_max_position_embeddings as {outer} and, in rope_scaling, as {inner}",
            "use the checkpoint's own config.json",
        )
    chosen = scaling.get("rope_theta") or config.get("rope_theta") or theta
    return kind, {**scaling, "rope_theta": float(chosen)}


def grouped_heads(config: Config) -> Config:
    """Head dimensions of a family whose heads have keys and values of their own."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return {"nope_dim": 0, "rope_dim": head_dim, "v_dim": head_dim, "kv_lora": 0, "num_kv_heads": num_kv_heads}
