"""Reads weights from Hugging Face safetensors folders and GGUF files into a model's tensors.

This package knows file formats and names of tensors, not models: `decoders` decide where each tensor belongs,
`starting` brings the two together.
"""
