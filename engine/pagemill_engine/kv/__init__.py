"""Paged KV cache bookkeeping: block pool, block tables, prefix cache. Plain Python and numpy, no torch."""
