"""Weights from GGUF files and Hugging Face folders."""
