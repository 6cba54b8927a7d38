"""The one place from which the model takes its kernels."""

from __future__ import annotations

from specter.kernels.reference import Product, expert_tiles, gated, product, tiled_product

__all__ = ["Product", "expert_tiles", "gated", "product", "tiled_product"]
