"""The parts of `pagemill plan`: the capacity of one replica, and the number of replicas for a load.

`replica` describes one replica: bytes from the engine's own memory budget, and step times that were measured
(`measuring`), read from a file or derived from a data sheet (`accelerators`). `forecast` uses the
autoscaler's own prediction, `simulated_latencies` simulates the scheduler on a virtual clock, `report` shows both.
"""
