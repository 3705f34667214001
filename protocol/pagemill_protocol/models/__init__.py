"""Model families as declarations: what a decoder is made of and which tensors fill it, as data without torch.

One file a family; `registry` finds it by the architecture that a model's files name. Readers of the declarations:
`model_spec` (sizes, for planning), the engine's `models` (torch modules) and `loading` (weights), the reference page.
"""
