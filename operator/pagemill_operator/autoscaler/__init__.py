"""How many replicas a deployment should have: pure functions of what was measured and of what was decided before.

`decide` turns a `Policy` (the resource), `Signals` (the load stream and the pods) and a `Memory` (earlier decisions)
into a `Decision` and the next memory; nothing here reads a clock, speaks HTTP or writes replicas. A `Record` holds all
three, so every decision can be replayed. `scaler` keeps the memories of all deployments for whoever runs it.
"""
