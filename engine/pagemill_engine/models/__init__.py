"""Runs a family's declaration (`pagemill_protocol.models`) with torch and the operations of `pagemill_kernels`.

Knows no family: a decoder is built from its declared parts, which own their weights. Knows neither files (`loading`),
nor requests (`scheduler`), nor devices. What the native decoder (`native`) shares with it knows no torch: reading
(`tensors`), row orders, rotary tables, and the face that a runner sees (`step_model`).
"""
