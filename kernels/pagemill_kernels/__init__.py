"""Device operations of the engine: one package per operation, with a torch reference next to the fast implementations.

A package contains `reference.py` (the formula, for tests and for devices without an implementation of their own) and
one module per device. `registry.ops_for(backend)` returns the operations with which a model is built. Requests,
schedulers and models are unknown here: there are only tensors, slots and block tables.
"""
