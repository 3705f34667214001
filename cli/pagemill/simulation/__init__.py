"""The parts of `pagemill simulate`: a deployment's replicas under traffic, scaled by one or more scaling policies.

`traffic`, `fleet` and `policies` turn file and options into the simulator's input; `running` runs the simulations, and
`table` shows the results. `pagemill.planning` describes a replica, as for `pagemill plan`.
"""
