"""Model families as declarations: the parts of a decoder and the tensors that fill them, as data without torch.

One file per family; `registry` finds it by the architecture that a model's files name. Readers of the declarations:
`model_spec` (sizes, for planning), the engine's `models` (torch modules) and `loading` (weights), the reference page.
"""
