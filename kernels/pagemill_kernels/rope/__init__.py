"""Rotary position embedding (arXiv 2104.09864), rotate-half form as in Hugging Face checkpoints, applied in place.

y = x * cos + rotate_half(x) * sin, where rotate_half(x) = [-x2, x1] of the two halves [x1, x2] of a head.
"""
