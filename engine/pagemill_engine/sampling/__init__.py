"""What requests ask of the sampler, from admission to each step's tokens.

`rows` keeps it as arrays and picks a step's part, `sampler` hands that to the device and tells the tokens. How they are
chosen is in `pagemill_kernels.sampling`; when a choice ends is decided elsewhere.
"""
