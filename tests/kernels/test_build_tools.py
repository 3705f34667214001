"""A GPU node without a C compiler or Python's headers is reported at the start, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagemill_kernels.gpu import building, launch
from pagemill_kernels.gpu.building import explain


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    (tmp_path / "Python.h").touch()
    return tmp_path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the only program on PATH."""
    (folder := tmp_path / "bin").mkdir()
    (path := folder / "gcc").touch(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return path


def test_a_compiler_and_headers_are_sufficient(headers: Path, program: Path) -> None:
    assert explain(None, headers) is None
    assert explain(str(program), headers) is None


def test_a_missing_compiler_is_named_with_the_package(headers: Path, program: Path) -> None:
    program.unlink()
    reported = explain(None, headers)
    assert reported is not None
    assert "neither gcc nor clang is there; install one" in reported
    assert "apt-get install gcc" in reported
    assert "'nvcc++'" in str(explain("nvcc++", headers)), "the compiler that the environment names"


def test_missing_headers_are_named_with_their_folder_and_package(tmp_path: Path, program: Path) -> None:
    reported = explain(None, tmp_path / "python3.11")
    assert reported is not None
    assert f"{tmp_path}/python3.11/Python.h is not there" in reported
    assert "python3-dev" in reported


def test_without_build_tools_no_kernel_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(building, "chosen_compiler", lambda: "/no/such/cc")
    assert "'/no/such/cc', is not there" in str(launch.unavailable_reason())
