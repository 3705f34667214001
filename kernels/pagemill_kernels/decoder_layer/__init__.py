"""All decoder layers in one call, where a device has such: made of a model's own parts once they are loaded.

The formula is the model's: what `pagemill_engine.models` computes by the single operations, so there is no reference
beside it.
"""
