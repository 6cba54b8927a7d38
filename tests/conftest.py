"""Kernels run in Triton's interpreter where there is no GPU; the mode is fixed when a kernel's module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
