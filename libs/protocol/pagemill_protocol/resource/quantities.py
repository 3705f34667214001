"""Kubernetes quantities and Go durations: their patterns and their values in bytes, cores and seconds.

Neighbours: `fields` makes pydantic types of them; the operator's plan reads values with the functions below. Sources:
the Kubernetes resource-quantity format (a decimal with an SI or binary suffix) and Go's `time.ParseDuration`.
"""

from __future__ import annotations

import re
from decimal import Decimal

MEMORY_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
CPU_PATTERN = r"^([0-9]+m|[0-9]+(\.[0-9]+)?)$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"

_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BYTES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def memory_bytes(quantity: int | str) -> int:
    """Return the bytes of a memory quantity: `"4Gi"` -> 4294967296. Raises `ValueError`."""
    if isinstance(quantity, int):
        return _not_negative(quantity)
    if not re.fullmatch(MEMORY_PATTERN, quantity):
        raise ValueError(f"{quantity!r} is not an amount of memory; write it like 512Mi, 8Gi or a number of bytes")
    number = quantity.rstrip("KMGTPki")
    return int(Decimal(number) * _BYTES[quantity[len(number) :]])


def cpu_cores(quantity: int | str) -> float:
    """Return the cores of a CPU quantity: `"500m"` -> 0.5. Raises `ValueError`."""
    if isinstance(quantity, int):
        return float(_not_negative(quantity))
    if not re.fullmatch(CPU_PATTERN, quantity):
        raise ValueError(f'{quantity!r} is not an amount of CPU; write it like 2, "1.5" or 500m')
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def duration_seconds(duration: str) -> float:
    """Return the seconds of a duration: `"1m30s"` -> 90.0. Raises `ValueError`."""
    if not re.fullmatch(DURATION_PATTERN, duration):
        raise ValueError(f"{duration!r} is not a duration; write it like 300ms, 30s, 5m or 1h30m")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", duration)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _not_negative(value: int) -> int:
    if value < 0:
        raise ValueError(f"{value} is negative; a quantity is 0 or more")
    return value
