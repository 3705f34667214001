"""y = x W^T + b where both are codes of 8 bits: a scale for each row of x, found as it comes, and each row of W.

int8 codes add up exactly in int32, e4m3 codes in float32; the scales meet the sums once, at the end. Weights alone in
codes, with scales for groups of inputs: `pagemill_kernels.linear`.
"""
