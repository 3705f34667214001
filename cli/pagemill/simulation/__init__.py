"""The parts of `pagemill simulate`: a deployment's fleet under traffic, moved by one scaling policy or several.

`traffic`, `fleet` and `policies` make of file and options what the simulator wants; `progress` shows how far it is,
`table` what came of it. What a replica is comes from `pagemill.planning`, as for `pagemill plan`.
"""
