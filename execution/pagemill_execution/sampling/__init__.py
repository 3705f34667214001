"""Sampling parameters of the running requests, from admission to each step's tokens.

`rows` keeps them as arrays and selects a step's part; `sampler` passes that to the device and returns the tokens.
`pagemill_kernels.sampling` defines how tokens are chosen; the scheduler decides when a choice ends.
"""
