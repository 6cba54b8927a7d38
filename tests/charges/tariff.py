"""What every operation of a small model moves and computes, worked out by hand, apart from `CostModel`.

The model: V = 32, D = 8, three layers of which the first is dense, dense width 10, E = 6 experts of width F = 4, top 2,
shared width 12, two heads with queries of 3 + 2 channels and values of 4, latents of 7 (so 9 numbers per cached
position). A tile has 4 rows, the KV cache 40 positions, weights and activations 2 bytes, INT4 experts 4.125 bits.

A product [rows, n] x [n, m] moves n*m weights and rows*(n + m) activations, and computes 2*rows*n*m flops. So:

| product        | n*m | n + m |                | n*m | n + m |
|----------------|-----|-------|----------------|-----|-------|
| query          |  80 |    18 | router         |  48 |    14 |
| output         |  64 |    16 | shared gate/up | 192 |    32 |
| latent         |  72 |    17 | shared down    |  96 |    20 |
| absorbed k, v  |  98 |    21 | head           | 256 |    40 |
| dense gate/up  | 160 |    28 | dense down     |  80 |    18 |
"""

from __future__ import annotations

from specter.models.spec import ModelSpec

SPEC = ModelSpec(
    name="by-hand",
    vocab=32,
    hidden=8,
    num_layers=3,
    num_dense_layers=1,
    dense_inter=10,
    expert_inter=4,
    num_experts=6,
    top_k=2,
    shared_inter=12,
    num_heads=2,
    nope_dim=3,
    rope_dim=2,
    v_dim=4,
    kv_lora=7,
    max_positions=64,
)
TILE_ROWS = 4
KV_CAPACITY = 40
PAYLOAD = 192  # gate, up and down: 3 * 8 * 4 weights of 2 bytes

Charge = tuple[str, int, int, int, int]  # the timeline's label, bytes, flops, kernels, launches

ATTENTION, ATTENTION_ROW = 80 + 64 + 72 + 98, 18 + 16 + 17 + 21
DENSE, DENSE_ROW = 160 + 80, 28 + 18
SHARED, SHARED_ROW = 48 + 192 + 96, 14 + 32 + 20  # with the router
SCORES = 2 * 2 * 40 * (9 + 7)  # flops of a row: two heads, 40 positions, keys of 9 and values of 7
EMBED_ROW = 2 * 16  # a row of 8 channels read and written
COMBINE_ROW = 2 * 2 * 8 * 4 + 3 * 16  # two rows in fp32 written and read, three rows in 2 bytes

# All weights that are not routed experts' and are read by a draft step: head, attention, dense, router and shared.
READ = 256 + 3 * ATTENTION + DENSE + 2 * SHARED
OWN_INT4_SAVES = 3132  # READ = 2110 weights at 4.125 bits instead of 16, rounded down
assert READ == 2110 and int(READ * (16 - 4.125) / 8) == OWN_INT4_SAVES


def draft(rows: int, experts: int) -> tuple[int, int]:
    """Bytes and flops of a draft step that reads `rows` tokens and so many experts per layer; its head has one row."""
    attention = 2 * ATTENTION + 2 * rows * ATTENTION_ROW + 2 * (40 + rows) * 9
    first = attention + rows * EMBED_ROW + 2 * DENSE + 2 * rows * DENSE_ROW
    int4_weights = -(-experts * 96 * 4125 // 8000)
    other = attention + 2 * SHARED + 2 * rows * SHARED_ROW + int4_weights + rows * 16 + rows * COMBINE_ROW
    head = 2 * 256 + 2 * 40
    flops = 3 * (2 * ATTENTION + SCORES) + 2 * DENSE + 2 * (2 * SHARED + 2 * 2 * 96 + 2 * 2 * 8)
    return head + first + 2 * other, 2 * 256 + rows * flops


assert draft(rows=1, experts=2) == (592 + 2114 + 2 * (2314 + 99 + 16 + 176), 512 + 3668 + 2 * (3860 + 384 + 32))
DRAFT_KERNELS = 3 + (1 + 8 + 4) + 2 * (8 + 3 + 3 + 2 + 1)  # head; embedding, attention, dense; the two others


def target(tiles: int) -> dict[str, Charge]:
    """A target pass over `tiles` tiles of 4 rows; each tile reads the KV cache; one launch per kernel."""
    rows, suffix = 4 * tiles, "" if tiles == 1 else f" ({tiles} tiles)"
    attention = 2 * ATTENTION + 2 * rows * ATTENTION_ROW + 2 * (40 * tiles + rows) * 9
    first = attention + rows * EMBED_ROW + 2 * DENSE + 2 * rows * DENSE_ROW
    scores = rows * (2 * ATTENTION + SCORES)
    table = {
        f"dense layer{suffix}": ("attend_and_route", first, scores + 2 * rows * DENSE, 1 + 8 + 4, 13),
        f"attention, router, shared{suffix}": (
            "attend_and_route", attention + 2 * SHARED + 2 * rows * SHARED_ROW, scores + 2 * rows * SHARED,
            8 + 3 + 3, 14,
        ),
        f"next router{suffix}": ("predict_next", 2 * 48 + 2 * rows * 14, 2 * rows * 48, 2, 2),
        f"combine{suffix}": ("combine", rows * COMBINE_ROW, 2 * rows * 2 * 8, 1, 1),
        f"head{suffix}": ("head", 2 * 256 + 2 * rows * 40, 2 * rows * 256, 3, 3),
    }  # fmt: skip
    for experts in range(1, 7):
        # An expert computes whole tiles: at most all rows, and at most one tile of padding beyond the routed rows.
        computed = min(experts * rows, 2 * rows + experts * 4)
        name = f"{experts} expert{'s' if experts > 1 else ''}{suffix}"
        table[name] = ("experts", experts * PAYLOAD + rows * 16, 2 * 96 * computed, 2, 2)
    return table


TARIFF: dict[str, Charge] = {
    "draft step": ("draft_step", *draft(1, 2), DRAFT_KERNELS, 1),
    "draft step of 2 rows": ("draft_step", *draft(2, 4), DRAFT_KERNELS, 1),
    "draft step of 3 rows": ("draft_step", *draft(3, 6), DRAFT_KERNELS, 1),
    "draft step of 6 rows": ("draft_step", *draft(6, 6), DRAFT_KERNELS, 1),
    # 3 layers of 9 numbers of 2 bytes a position, read and written
    "copy of 1 position's KV": ("copy_kv", 2 * 3 * 9 * 2, 0, 3, 3),
    "copy of 5 positions' KV": ("copy_kv", 5 * 2 * 3 * 9 * 2, 0, 3, 3),
    "INT4 draft step": ("draft_step", draft(1, 2)[0] - OWN_INT4_SAVES, draft(1, 2)[1], DRAFT_KERNELS, 1),
    "INT4 draft step of 2 rows": ("draft_step", draft(2, 4)[0] - OWN_INT4_SAVES, draft(2, 4)[1], DRAFT_KERNELS, 1),
    **target(tiles=1),
    **target(tiles=2),
}
NAMES = {charge: name for name, charge in TARIFF.items()}
assert len(NAMES) == len(TARIFF), "every charge has a name of its own"
