"""Bounds of adapters and names of their files, for code that reads no adapter."""

from __future__ import annotations

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter's folder, as PEFT writes it."""
MAX_RANK = 512
"""The largest rank of an adapter that any engine serves."""
