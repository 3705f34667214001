"""OLMo 3 (Allen AI, 2025): OLMo 2 with a window in three of four layers, which no scaling of positions concerns. Its
GGUF files have OLMo 2's name."""

from __future__ import annotations

from pagemill_models.declaration.family import Family
from pagemill_models.families.olmo2 import read_windowed

FAMILY = Family(read_windowed)
