"""Recurrent layers: a short causal convolution, the gated delta rule and Mamba 2's state space, over states at block
boundaries and the inputs of the tokens since.

A row's state is that behind a whole number of blocks. A step computes its tokens from that state and the row's log, and
folds the blocks that its tokens complete into new states. Tokens are always taken in the groups of their blocks, so how
a prompt is cut into steps changes no group.
"""
