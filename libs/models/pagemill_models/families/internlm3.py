"""InternLM 3 (InternLM team, 2025): InternLM with grouped queries; `internlm` reads both."""

from __future__ import annotations

from pagemill_models.families.internlm import FAMILY

__all__ = ["FAMILY"]
