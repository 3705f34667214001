"""The parts of `pagemill plan`: what one replica can do, and how many of them a load needs.

`replica` puts together what is known of one replica: bytes from the engine's own memory budget, step times that were
`measuring` gave, a file (`fits`) or a data sheet (`accelerators`). `forecast` asks the autoscaler's own prediction,
`rehearsal` plays the scheduler through on a virtual clock, `report` shows both.
"""
