"""Reads matrices that other projects' quantizers packed into several tensors, as one matrix each.

There is one module per format; `formats` chooses by the method in `config.json`. `folder` combines the matrices with a
`SafetensorsFolder`. Integers with a scale per group are used without rounding; other types become floats.
"""
