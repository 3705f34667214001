"""All decoder layers in one call, for devices with such an operation; it is built from a model's loaded parts.

There is no reference: the formula is the model's, which `pagemill_execution.decoders` computes by single operations.
"""
