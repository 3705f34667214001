"""The reason why torch finds no CUDA device, with the driver's version, torch's version, and the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagemill_kernels.gpu.driver import Driver, explain, find_driver

REPORTED = "from pagemill_kernels.gpu import launch; print(launch.unavailable_reason())"
VERSION = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
OPEN_VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"


def test_a_driver_older_than_torchs_cuda_differs_from_a_missing_device() -> None:
    reported = explain(Driver((12, 2), "535.104.05"), "2.15.0+cu132", "13.2")
    assert reported == (
        "the NVIDIA driver 535.104.05 is too old: it supports CUDA 12.2, and torch 2.15.0+cu132 is built for CUDA "
        "13.2; update the driver to release 580 or later, or use a torch that is built for CUDA 12"
    )
    assert "update the driver to one for CUDA 15" in explain(Driver((13, 0), None), "3.0", "15.1")


def test_the_how_to_names_the_minimum_driver_release_for_each_cuda() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve-on-gpus.md").read_text()
    for cuda in (12, 13):
        reported = explain(Driver((cuda - 1, 0), "1.0"), "2.15.0", f"{cuda}.0")
        (release,) = re.findall(r"update the driver to release (\d+)", reported)
        assert re.search(rf"{release} .{{0,60}}CUDA {cuda}", page), f"release {release} for CUDA {cuda}"


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "words"),
    [
        (None, "13.2", ["no NVIDIA driver is (libcuda.so.1 cannot be loaded)", "LD_LIBRARY_PATH"]),
        (
            Driver((13, 0), "580.65.06"),
            "13.2",
            ["no CUDA device is visible, though the NVIDIA driver 580.65.06", "13.0"],
        ),
        (Driver((14, 0), None), "13.2", ["though the NVIDIA driver is there (CUDA 14.0)", "CUDA_VISIBLE_DEVICES"]),
        (Driver((14, 0), None), None, ["torch 2.15.0 is built without CUDA", "install a build of torch with CUDA"]),
    ],
)
def test_other_causes_are_reported_with_their_remedy(
    driver: Driver | None, torch_cuda: str | None, words: list[str]
) -> None:
    reported = explain(driver, "2.15.0", torch_cuda)
    assert all(each in reported for each in words), reported
    assert "too old" not in reported


def fake_driver(folder: Path, body: str) -> dict[str, str]:
    """Return an environment in which the driver's library is a fake one."""
    source = folder / "driver.c"
    source.write_text(body)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"LD_LIBRARY_PATH": str(folder)}


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_torch_reports_the_fake_driver_as_too_old(tmp_path: Path) -> None:
    environment = fake_driver(tmp_path, "int cuDriverGetVersion(int *version) { *version = 11080; return 0; }")
    # One process, because importing torch takes most of the time.
    verdict = "import torch\ntry: torch.cuda.init()\nexcept RuntimeError as error: print(error)"
    reported = run(f"{REPORTED}\n{verdict}", environment)
    assert "is too old: it supports CUDA 11.8, and torch" in reported
    assert f"torch {torch.__version__} is built for CUDA {torch.version.cuda}; update the driver" in reported
    assert "driver on your system is too old (found version 11080)" in reported


@pytest.mark.parametrize("body", ["int cuDriverGetVersion(int *version) { return 34; }", "int nothing;"])
def test_a_library_that_is_not_a_driver_is_ignored(tmp_path: Path, body: str) -> None:
    code = "from pagemill_kernels.gpu.driver import find_driver; print(find_driver())"
    assert run(code, fake_driver(tmp_path, body)) == "None"


@pytest.mark.parametrize(
    ("text", "release"), [(VERSION, "535.104.05"), (OPEN_VERSION, "580.65.06"), ("", None), (None, None)]
)
def test_the_release_is_that_of_the_kernel_module(tmp_path: Path, text: str | None, release: str | None) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    code = f"""
from pathlib import Path
from pagemill_kernels.gpu.driver import find_driver
print(find_driver(Path({str(tmp_path / "version")!r})).release)
"""
    environment = fake_driver(tmp_path, "int cuDriverGetVersion(int *version) { *version = 12020; return 0; }")
    assert run(code, environment) == str(release)


def test_a_machine_without_a_driver_has_none() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    assert find_driver() is None
