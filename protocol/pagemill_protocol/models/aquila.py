"""Aquila and Aquila 2 (arXiv 2408.07410): Llama's layers, names and keys."""

from __future__ import annotations

from pagemill_protocol.models import llama
from pagemill_protocol.models.family import Family

FAMILY = Family(llama.read_config)
