"""The rows of running requests on the device: what changed is written in one launch, a step's inputs are built in one.

Nothing here is read by the host: the token that one step samples is the next step's input without leaving the device.
"""
