"""Kinds of drafts: whose non-expert weights and KV cache the INT4 experts are used with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specter.models.base import Model
from specter.registry import Registry

SHARED = "shared"


def share(target: Model, make_draft: Callable[[], Model]) -> Model:
    """The target drafts by itself, over its own weights and KV."""
    return target


@dataclass(frozen=True, slots=True)
class DraftKind:
    """A way to draft.

    is_own: the draft has non-expert weights and a KV cache of its own, which it must fill.
    copies_kv: its KV is a copy of the target's, made anew in every round; charged, by the virtual clock only.
    weight_bits: per weight of its own copy, as charged; None charges the target's.
    join: makes one `Model` of the target and of a draft that `make_draft` builds apart from it.
    recorded_as: the kind whose recordings it replays; None: its own.
    """

    is_own: bool = False
    copies_kv: bool = False
    weight_bits: float | None = None
    join: Callable[[Model, Callable[[], Model]], Model] = share
    recorded_as: str | None = None


DRAFTS: Registry[DraftKind] = Registry("system.draft")
DRAFTS.register(SHARED)(DraftKind())
# What sharing the KV gains: the same tokens.
DRAFTS.register("copied_kv")(DraftKind(copies_kv=True, recorded_as=SHARED))
