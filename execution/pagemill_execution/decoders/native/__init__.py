"""Runs a family's declaration on the CPU without torch: packed weights and native calls.

It is the counterpart of `on_torch` for decoders whose layers one native call computes (`layers.can_fuse`), and shares
with it the reading and ordering of stored tensors. Requests are `scheduler`'s part, steps `executing`'s.
"""
