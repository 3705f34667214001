"""The kernels that are selected for a processor, by its flags or by the setting."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pagemill_kernels.cpu import library, processor
from pagemill_kernels.settings import LEVEL_SETTING

AVX2 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BFLOAT16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
LEVELS = ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(LEVEL_SETTING, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return monkeypatch


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (BFLOAT16, LEVELS),
        (BFLOAT16 - {"avx512_vnni"}, LEVELS[1:]),
        (AVX512, LEVELS[1:]),
        (AVX512 - {"avx512dq"}, LEVELS[2:]),
        (AVX2, LEVELS[2:]),
        (AVX2 - {"fma"}, ()),
        (set(), ()),
    ],
)
def test_flags_select_all_levels_whose_requirements_they_meet(
    flags: set[str], levels: tuple[str, ...], machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(processor, "flags", lambda: frozenset(flags))
    assert processor.levels() == levels


def test_the_flags_are_those_of_the_first_processor(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nvmx flags\t: ept\n\nflags\t\t: fpu\n")
    machine.setattr(processor, "_fields", processor._fields.__wrapped__)
    machine.setattr(processor, "_CPUINFO", cpuinfo)
    assert processor.flags() == {"fpu", "avx2", "fma"}
    machine.setattr(processor, "_CPUINFO", tmp_path / "absent")
    assert processor.flags() == set()


@pytest.mark.parametrize(("vendor", "faster"), [("GenuineIntel", True), ("AuthenticAMD", False), ("", False)])
def test_the_processors_maker_determines_which_matmuls_are_faster_than_bfloat16(
    vendor: str, faster: bool, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n")
    machine.setattr(processor, "_fields", processor._fields.__wrapped__)
    machine.setattr(processor, "_CPUINFO", cpuinfo)
    assert processor.multiplies_integers_faster() is faster
    assert processor.multiplies_floats_faster() is faster


def test_another_architecture_needs_no_flags_or_has_no_kernels(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(processor, "flags", frozenset)
    machine.setattr(platform, "machine", lambda: "aarch64")
    assert processor.levels() == ("armv8-a",)
    machine.setattr(platform, "machine", lambda: "riscv64")
    assert processor.levels() == ()
    assert "riscv64" in processor.no_level_reason()


def test_the_setting_selects_a_lower_level_or_none(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(processor, "flags", lambda: frozenset(AVX512))
    machine.setenv(LEVEL_SETTING, "x86-64-v3")
    assert processor.levels() == ("x86-64-v3",)
    machine.setenv(LEVEL_SETTING, "none")
    assert processor.levels() == ()
    assert processor.no_level_reason() == "PAGEMILL_CPU_LEVEL is none"


@pytest.mark.parametrize(
    ("level", "bfloat16", "amx"),
    [
        ("", True, True),
        ("none", True, True),
        ("x86-64-v4-bf16", True, False),
        ("x86-64-v4", False, False),
        ("x86-64-v3", False, False),
    ],
)
def test_a_selected_level_also_applies_to_matmuls_of_other_libraries(
    level: str, bfloat16: bool, amx: bool, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(processor, "flags", lambda: frozenset(BFLOAT16 | {"amx_tile", "amx_bf16"}))
    machine.setenv(LEVEL_SETTING, level)
    assert (processor.multiplies_bfloat16(), processor.has_amx()) == (bfloat16, amx)


@pytest.mark.parametrize("level", ["x86-64-v4-bf16", "armv8-a", "avx2"])
def test_a_level_that_the_processor_does_not_support_is_refused_with_the_supported_ones(
    level: str, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(processor, "flags", lambda: frozenset(AVX512))
    machine.setenv(LEVEL_SETTING, level)
    library.load.cache_clear()
    try:
        assert f"{level!r}; this processor can have x86-64-v4, x86-64-v3, none" in str(library.unavailable_reason())
    finally:
        library.load.cache_clear()


def test_the_flags_of_this_machine_are_read() -> None:
    if platform.machine() == "x86_64":
        assert "sse2" in processor.flags()
