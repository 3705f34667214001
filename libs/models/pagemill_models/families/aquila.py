"""Aquila and Aquila 2 (arXiv 2408.07410): Llama's layers, names and keys."""

from __future__ import annotations

from pagemill_models.declaration.family import Family
from pagemill_models.families import llama

FAMILY = Family(llama.read_config)
