"""Runs a family's declaration (`pagemill_protocol.models`) on the CPU without torch: packed weights, and native calls.

The counterpart of `models` for decoders whose layers one native call computes (`layers.can_fuse`); reading and ordering
of what files store is shared with it. Knows neither requests (`scheduler`) nor steps (`runner`).
"""
