"""Declarations of models: the parts of a decoder and the tensors that fill them, as data without torch.

A family is one file of `families`; `registry` finds it by the architecture that a model's files name. Readers of the
declarations: `spec` (sizes, for planning), the engine's `decoders` and `weights`, the reference page.
"""
