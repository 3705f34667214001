"""Scaling policies: pure functions that compute the number of replicas of a deployment.

`policy` has the protocol that every policy implements, and `registry` finds policies by name, including those of other
packages. `demand` is the default policy; `target_tracking` is the algorithm of HorizontalPodAutoscaler. A policy gets
`settings` (from the resource), `signals` (the load stream and the replicas) and its own memory, and returns a
`decision`. Nothing in this package reads a clock, speaks HTTP or writes replicas. A record holds a decision with all of
its inputs, so it can be replayed. Neighbour: `backends.scaler` keeps the memories of all deployments.
"""
