"""Groups of ranks that compute one model: sums and copies between them, in one process, over shared memory, by torch.

A group knows no model and no step. `abort` wakes every rank that waits, so that none waits for one that has failed.
"""
