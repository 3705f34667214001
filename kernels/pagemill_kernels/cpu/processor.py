"""What this processor can do, and which compiled kernels fit it, as the system says and `settings` wants.

Names of flags are Linux's, those of levels the C++ compilers' (`-march`); `library` loads what was chosen here.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from pagemill_kernels.cpu.settings import LEVEL_SETTING, NONE, chosen_level

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
"""By machine, and of each level the flags that it needs; the highest comes first."""
_CPUINFO = Path("/proc/cpuinfo")


@cache
def _fields() -> dict[str, str]:
    """Of the first processor; empty where the system does not say."""
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def flags() -> frozenset[str]:
    """Empty where the system does not say."""
    return frozenset(_fields().get("flags", "").split())


def fitting_levels() -> tuple[str, ...]:
    """That this processor has, the highest first."""
    return tuple(level for level, needed in _LEVELS.get(platform.machine(), {}).items() if needed <= flags())


def levels() -> tuple[str, ...]:
    """That this processor has and the setting allows, the highest first; empty: none. Raises ValueError for a setting
    that this processor does not have."""
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


def why_no_level() -> str:
    """Only where `levels` are empty."""
    if chosen_level() == NONE:
        return f"{LEVEL_SETTING} is {NONE}"
    return f"no kernels for this processor ({platform.machine()})"


def multiplies_bfloat16() -> bool:
    """Whether any kernels may, ours or others': no where the setting chose a level without."""
    return "avx512_bf16" in flags() and chosen_level() in ("", NONE, _BFLOAT16)


def multiplies_integers_faster() -> bool:
    """Than bfloat16, at any number of rows, as measured on Intel's processors; on AMD's bfloat16 is faster for many
    (docs/benchmarks.md)."""
    return _fields().get("vendor_id") == "GenuineIntel"


def multiplies_floats_faster() -> bool:
    """Float32 than bfloat16 by AVX512_BF16, where there are many rows: Intel's processors take twice as long for an
    instruction of the second, and multiply as much with it (docs/benchmarks.md)."""
    return _fields().get("vendor_id") == "GenuineIntel"


def has_amx() -> bool:
    """Tiles that multiply bfloat16, which belong to no level."""
    return {"amx_tile", "amx_bf16"} <= flags() and chosen_level() in ("", NONE)
