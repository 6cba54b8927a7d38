"""Where results here differ from the paper's: a sentence each, beside the figure and in docs/disagreements.md."""

from __future__ import annotations

SPEEDUP = (
    "The greedy speed-up over SpecMoEOff exceeds the paper's mean, because the stand-ins' greedy text repeats itself: "
    "drafts of 8 or 16 tokens are accepted almost whole and need few experts, so drafts of 3 lose more than on the "
    "paper's text."
)
LRU = (
    "The paper does not compare with LRU; at equal device bytes LRU is faster than the published planner in most "
    "cells, because the INT4 draft's bytes buy it two to five times as many slots."
)
ABSOLUTE = (
    "Absolute times are not the paper's: the virtual clock charges the bytes, flops and launches of this engine, not "
    "the paper's software, and the texts are the stand-ins'."
)
DEPTH = (
    "The paper's best K is 8 or 16; here it is the deepest that one pass verifies (47) on greedy text, which repeats "
    "itself, and 24 or more in most cells of sampled text, because a draft step loads nothing and costs little beside "
    "a verification, so a deeper round saves link time as long as its drafts are accepted."
)
PREFETCH = (
    "The paper's prefetch gains 5 %; here the published planner costs time in most cells, because what it "
    "copies ahead displaces residents that the same verification needs; on the looping text of the H200 its wait for "
    "the last copy costs as well."
)
KERNEL = (
    "Without its fused kernel the paper's system takes 36 ms more per token, and so about as much more per draft step; "
    "the same INT4 kernels launched once per expert take half a millisecond more per step, so their fusion is worth "
    "next to nothing while copies bound a round, and only experts in plain torch cost as much as the paper's."
)
PLANNER = (
    "The paper's planner relies on the draft's predictions and on hiding copies behind the draft; here perfect "
    "predictions gain next to nothing and wrong ones cost. An earlier plan gains or changes nothing and a later one "
    "costs, because a later plan names more experts, and each copy displaces one that the same verification may need; "
    "on the virtual clock the wait for the last copy costs nothing, since the link is what a round waits for."
)
OVERLAP = (
    "The paper's Prefetch Overlap plans several times a round; at its own residents and K the planner plans once here, "
    "because the first plan's copies are estimated to outlast the draft (high tier) or because the first tokens name "
    "as many experts as a layer holds (low tier); it plans again only where half of a layer or more is resident."
)
UNFUSED = (
    "The paper's unfused INT4 is faster than 16 bits, and fused INT4 faster still; so are our kernels launched once "
    "per expert, on the virtual clock, and by layer on an H200; only the row in plain torch, which rebuilds every "
    "weight, is slower than 16 bits, because its draft steps cost more than the loads that they save."
)
BACKENDS = (
    "The paper compares Marlin, ExLlama v1, ExLlama v2 and torch, with Marlin the fastest; no public INT4 kernel was "
    "measured here, so only the order “fused before torch” can be compared."
)
