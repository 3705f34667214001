"""The parts of `pagemill simulate`: a deployment's replicas under traffic, scaled by one or more scaling policies.

`traffic`, `fleet` and `policies` turn file and options into the simulator's input; `progress` shows the progress,
`table` the results. A replica is described by `pagemill.planning`, as for `pagemill plan`.
"""
