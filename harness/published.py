"""What the paper reports, as far as a figure or table here shows the same quantity. Source: the paper and its v1."""

from __future__ import annotations

ACCEPTANCE_MEAN = 0.9663  # mean over its models
ACCEPTANCE_DEEPSEEK = 0.99
FIDELITY_DEEPSEEK_GPTQ = 0.9633  # expert match, INT4 against FP16, native top-k
UNION_DEEPSEEK = {1: 6.0, 16: 31.7}  # distinct experts per layer, by K
SPEEDUP_MEAN, SPEEDUP_MAX = 1.50, 1.88  # TPOT of its SpecMoEOff over Specter's, over its models and data sets
K_DEEPSEEK = 16  # its optimum of the depth sweep
