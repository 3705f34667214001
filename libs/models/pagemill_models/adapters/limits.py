"""Bounds of adapters, for settings that are read where no adapter is."""

from __future__ import annotations

MAX_RANK = 512
"""The largest rank of an adapter that any engine serves."""
