"""Runs a family's declaration (`pagemill_models.declaration`) with torch and the operations of `pagemill_kernels`.

It knows no family: a decoder is built from its declared parts, which own their weights. Files are `loading`'s part,
requests `scheduler`'s, devices `runner`'s. The modules that the native decoder (`native`) shares import no torch:
reading (`tensors`), row orders, rotary tables, and the runner's interface (`step_model`).
"""
