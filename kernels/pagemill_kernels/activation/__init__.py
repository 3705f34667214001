"""SwiGLU's gate (arXiv 2002.05202): silu(gate) * up, over a fused [gate, up] projection."""
