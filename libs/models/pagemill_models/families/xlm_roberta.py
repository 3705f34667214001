"""XLM-RoBERTa (arXiv 1911.02116): RoBERTa in a hundred languages."""

from __future__ import annotations

from pagemill_models.declaration.family import Family
from pagemill_models.families.roberta import read_config

FAMILY = Family(read_config)
