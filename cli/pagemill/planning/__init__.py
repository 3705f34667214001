"""The parts of `pagemill plan`: what one replica can do, and how many replicas a load needs.

`replica` combines what is known of one replica: bytes from the engine's own memory budget, step times that were
measured (`measuring`), read from a file (`fits`) or derived from a data sheet (`accelerators`). `forecast` uses the
autoscaler's own prediction, `rehearsal` simulates the scheduler on a virtual clock, `report` shows both.
"""
