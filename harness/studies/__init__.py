"""Studies: one module per experiment or probe, with its data, its figures and its tables.

A module registers what it defines (see `registry`); nothing else lists it. `harness.catalogue` imports them all.
"""
