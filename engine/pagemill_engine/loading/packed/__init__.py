"""Matrices that other projects' quantizers packed into several tensors, given as one matrix each.

One file a format; `formats` chooses by the method that `config.json` names. `folder` lays the matrices over a
`SafetensorsFolder`. Integers with a scale a group stay the codes they are; all other types are given as floats.
"""
