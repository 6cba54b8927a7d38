"""`lru`: plain decoding over a least-recently-used expert cache, the strongest simple baseline.

Faithful to: the default of most offloading runtimes. Per layer, hits are computed first while misses arrive over a
copy stream, one way (host copies are never written back), into slots that are freed one by one. No draft, no
prediction, no prefetch. Its eviction is `specter.experts.policies.lru`, which Specter as published uses too.
"""
