"""What the paper reports, as far as a figure or table here shows the same quantity. Source: the paper and its v1.

By model, under the names of `charged_as`. All of it was measured on the real checkpoints.
"""

from __future__ import annotations

DEEPSEEK, QWEN, PHI = "deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe"

ACCEPTANCE_MEAN = 0.9663  # mean over its models
ACCEPTANCE = {DEEPSEEK: 0.99}
TPOT_V1 = {DEEPSEEK: {"high": 72.0, "low": 99.0}, QWEN: {"high": 74.0}, PHI: {"high": 163.0}}  # ms, by tier
SPEEDUP_MEAN, SPEEDUP_MAX = 1.50, 1.88  # TPOT of its SpecMoEOff over Specter's, over its models and data sets
EXPECTED_RUN, LARGEST_DEPTH = 28.7, 32  # E[A] at the mean acceptance, and the K_max that it concludes
# Expert match against FP16 at native top-k, by method; "Q4" and so on of GGUF.
FIDELITY = {
    DEEPSEEK: {"gptq": 0.9633, "awq": 0.9572, "q2_k": 0.9296, "q4_k": 0.9653, "q8_0": 0.9938},
    QWEN: {"gptq": 0.9082},
    PHI: {"gptq": 0.9650},
}
FIDELITY_LEAST = {DEEPSEEK: {"q8_0": 0.9866}, QWEN: {"gptq": 0.8630}}  # the least value
FIDELITY_REQUESTS = 1000  # their number; 24 layers make 24,000 pairs
HIT_RATE_LRU = {DEEPSEEK: {6: 0.292, 16: 0.509, 32: 0.766}}  # v1, by slots per layer
HIT_RATE_SPECULATIVE = {DEEPSEEK: {6: 0.9985, 16: 0.9862, 32: 0.9625}}  # v1, by slots per layer
# v1, tokens per second
ABLATION = {DEEPSEEK: {"full": 13.02, "no prefetch": 12.37, "no fused kernel": 8.88, "neither": 8.29}}
UNION = {DEEPSEEK: {1: 6.0, 16: 31.7}}  # distinct experts per layer, by K
UNION_GROWTH = {DEEPSEEK: 5.29, QWEN: 7.18, PHI: 4.65}  # from K = 1 to 16
DEPTH = {DEEPSEEK: 16, QWEN: 8, PHI: 16}  # K at the optimum of its sweep
