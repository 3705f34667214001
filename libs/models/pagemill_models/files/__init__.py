"""The formats of model files: GGUF, safetensors headers, JSON, and files that are still being downloaded."""
