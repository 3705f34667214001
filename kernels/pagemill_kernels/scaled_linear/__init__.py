"""Linear layers with 8-bit weights and activations: a scale per row of x, computed on the fly, and per row of W.

int8 values add up exactly in int32, e4m3 values in float32; the scales are applied to the sums once, at the end.
`pagemill_kernels.linear` has layers with only quantized weights, whose scales are for groups of inputs.
"""
