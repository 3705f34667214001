"""LoRA adapters (arXiv 2106.09685) in the folders that PEFT writes: which layers they add to, and from which tensors.

`read_adapter` returns the tensors of each linear layer and refuses what is not served. The engine's `adapters` package
reads the values and keeps them.
"""
