"""InternLM 3 (InternLM team, 2025): InternLM with grouped queries; `internlm` reads both."""

from __future__ import annotations

from pagemill_protocol.models.internlm import FAMILY

__all__ = ["FAMILY"]
