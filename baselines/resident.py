"""`resident`: plain decoding with every expert on the GPU, whatever the budget: the ceiling.

Faithful to: a model that fits. Where it does not fit the device, `fits_device` in its record is false. Its output is
also the reference that every other system must equal bit for bit.
"""
