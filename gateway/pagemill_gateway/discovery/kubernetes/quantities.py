"""Kubernetes quantities and durations as the API server has let them through: bytes and seconds.

The rules stand in `pagemill_crds.quantities`, which gateways do not carry; a test holds the two together.
"""

from __future__ import annotations

import re
from decimal import Decimal

_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h)")
_FACTORS = {unit: 10 ** (3 * power) for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)}
_FACTORS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def memory_bytes(quantity: int | str) -> int | None:
    """`"256Mi"` -> 268435456; None for what is no amount of memory."""
    if isinstance(quantity, int):
        return quantity
    match = _MEMORY.fullmatch(quantity)
    return int(Decimal(match[1]) * _FACTORS.get(match[2], 1)) if match else None


def duration_seconds(duration: str) -> float | None:
    """`"1m30s"` -> 90.0; None for what is no duration."""
    if not _DURATION.fullmatch(duration):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(duration))
