"""Runs a family's declaration (`pagemill_models.declaration`) with the operations of `pagemill_kernels`.

It knows no family: a decoder is built from its declared parts, which own their weights. There are three executions:
`on_torch`, `native` (CPUs without torch) and `by_transformers` (decoders that no family declares). What they share
imports no torch: reading (`tensors`), row orders, rotary tables, and the runner's interface (`step_model`). Files are
`weights`' part, requests `scheduler`'s, devices `executing`'s.
"""
