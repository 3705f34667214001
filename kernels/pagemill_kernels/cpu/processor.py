"""Features of this processor, and the compiled levels that it supports and `settings` allows.

Names of flags are Linux's, those of levels the C++ compilers' (`-march`); `library` loads the chosen level.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from pagemill_kernels.settings import LEVEL_SETTING, NONE, chosen_level

_BFLOAT16 = "x86-64-v4-bf16"
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        _BFLOAT16: _V4 | {"avx512_bf16", "avx512_vnni"},
        "x86-64-v4": _V4,
        "x86-64-v3": _V3,
    },
    "aarch64": {"armv8-a": frozenset()},
}
"""Levels by machine, the highest first, with the flags that each needs."""
_CPUINFO = Path("/proc/cpuinfo")


@cache
def _fields() -> dict[str, str]:
    """Return the fields of the first processor; empty if the system does not show them."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def flags() -> frozenset[str]:
    """Return the processor's flags; empty if the system does not show them."""
    return frozenset(_fields().get("flags", "").split())


def fitting_levels() -> tuple[str, ...]:
    """Return the levels that this processor supports, the highest first."""
    return tuple(level for level, needed in _LEVELS.get(platform.machine(), {}).items() if needed <= flags())


def levels() -> tuple[str, ...]:
    """Return the levels that this processor supports and the setting allows, the highest first; may be empty.

    Raises ValueError for a configured level that this processor does not support.
    """
    fitting = fitting_levels()
    wanted = chosen_level()
    if wanted == NONE:
        return ()
    if not wanted:
        return fitting
    if wanted not in fitting:
        has = ", ".join((*fitting, NONE))
        raise ValueError(f"{LEVEL_SETTING} is {wanted!r}; this processor can have {has}")
    return (wanted,)


def no_level_reason() -> str:
    """Return why `levels` is empty."""
    if chosen_level() == NONE:
        return f"{LEVEL_SETTING} is {NONE}"
    return f"no kernels for this processor ({platform.machine()})"


def multiplies_bfloat16() -> bool:
    """Whether kernels, Pagemill's or others', may multiply bfloat16. A configured level without it forbids it."""
    return "avx512_bf16" in flags() and chosen_level() in ("", NONE, _BFLOAT16)


def multiplies_integers_faster() -> bool:
    """Whether integers are multiplied faster than bfloat16 at any number of rows, as measured on Intel's processors.

    On AMD's processors bfloat16 is faster for many rows (docs/benchmarks.md).
    """
    return _is_intel()


def multiplies_floats_faster() -> bool:
    """Whether float32 is multiplied faster than bfloat16 by AVX512_BF16 if there are many rows.

    On Intel's processors an instruction of AVX512_BF16 takes four times as long as one of float32, for twice the
    products (docs/benchmarks.md).
    """
    return _is_intel()


def _is_intel() -> bool:
    return _fields().get("vendor_id") == "GenuineIntel"


def has_amx() -> bool:
    """Whether AMX tiles may multiply bfloat16. They belong to no level."""
    return {"amx_tile", "amx_bf16"} <= flags() and chosen_level() in ("", NONE)
