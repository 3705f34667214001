"""The rows of running requests on the device: one launch writes the changes, one builds a step's inputs.

The host reads nothing: the token that one step samples is the next step's input without leaving the device.
"""
