"""Weights from files into tensors that a model owns: Hugging Face safetensors folders and GGUF files.

Knows file formats and names of tensors, not models: `models` say which tensor goes where, `runner` brings the two
together.
"""
