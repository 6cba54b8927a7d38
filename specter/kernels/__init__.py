"""The one place from which the model takes its kernels."""

from __future__ import annotations

from specter.kernels.reference import Product, gated, gated_, product, tiled_product

__all__ = ["Product", "gated", "gated_", "product", "tiled_product"]
