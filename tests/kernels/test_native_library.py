"""The compiled library exists on every machine that supports it; otherwise the cause is reported."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagemill_kernels import registry
from pagemill_kernels.cpu import library

CAN_COMPILE = (
    platform.machine() == "x86_64"
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    and any(shutil.which(name) for name in ("c++", "g++", "clang++"))
)


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Load the library again, inside the test and after it."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a C++ compiler and a processor with AVX2")
def test_the_library_exists_if_it_can_be_compiled() -> None:
    assert library.unavailable_reason() is None


@pytest.mark.usefixtures("reloaded")
def test_without_the_library_torch_is_used_and_the_cause_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_LIBRARY_DIR", tmp_path)
    backend, how = registry.cpu_backend("float32", head_dim=64, block_size=16, heads_per_kv_head=3)
    assert backend == "cpu"
    assert "reinstall pagemill-kernels" in how or "no kernels for" in how
    assert "Without them torch computes" in caplog.text


@pytest.mark.usefixtures("reloaded")
@pytest.mark.skipif(not CAN_COMPILE, reason="needs a C++ compiler and a processor with AVX2")
def test_a_damaged_or_older_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in library._LIBRARY_DIR.glob("*.so"):
        (tmp_path / path.name).write_bytes(b"not a library")
    with monkeypatch.context() as patch:
        patch.setattr(library, "_LIBRARY_DIR", tmp_path)
        assert "does not load" in str(library.unavailable_reason())
    library.load.cache_clear()
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    assert "ABI version" in str(library.unavailable_reason())
