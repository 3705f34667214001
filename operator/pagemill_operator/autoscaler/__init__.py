"""How many replicas a deployment should have: scaling policies, pure functions of signals and of their own memory.

`policy` is the protocol that every algorithm implements, `registry` knows the algorithms by name, those of other
packages too. `demand` is the default and `target_tracking` the algorithm of HorizontalPodAutoscaler. All get the same
`settings` (the resource) and `signals` (the load stream and the replicas) and answer a `decision`; nothing here reads
a clock, speaks HTTP or writes replicas. A record holds all of it, so every decision can be replayed. Neighbour:
`backends.scaler` keeps the memories of all deployments.
"""
