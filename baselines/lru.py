"""`lru`: plain decoding over a least-recently-used expert cache, the strong simple rival.

Faithful to: what most offloading runtimes do by default. Per layer, hits are computed first while misses come over
a copy stream of their own, one way (host copies are never written back), into slots freed one by one.
No draft, no prediction, no prefetch. Its eviction is `specter.experts.policies.lru.LruEviction`, which Specter
as published uses too.
"""
