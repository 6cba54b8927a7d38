"""Kernels of the CPU decoder: plain torch, on any device."""

from __future__ import annotations

from specter.kernels.reference import Product, gated, gated_, product, tiled_product

__all__ = ["Product", "gated", "gated_", "product", "tiled_product"]
