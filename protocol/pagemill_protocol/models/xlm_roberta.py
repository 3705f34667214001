"""XLM-RoBERTa (arXiv 1911.02116): RoBERTa in a hundred languages."""

from __future__ import annotations

from pagemill_protocol.models.family import Family
from pagemill_protocol.models.roberta import read_config

FAMILY = Family(read_config)
