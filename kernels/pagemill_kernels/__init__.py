"""Device operations of the engine: one folder an operation, each with a plain torch reference beside what runs.

A folder holds `reference.py` (the formula, for tests and for devices without an implementation of their own) and one
module a device. `registry.ops_for(device_type)` gives the set that a model is built with. Nothing here knows of
requests, schedulers or models: only tensors, slots and block tables.
"""
