"""Triton builds its launcher in the engine's image, which is the first step on a GPU that needs no GPU."""

from __future__ import annotations

from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import Release

BUILD = """
import pathlib, subprocess, tempfile
import triton.backends.nvidia as nvidia
from triton.runtime.build import compile_so_from_file
root = pathlib.Path(nvidia.__file__).parent
driver = tempfile.mkdtemp()
subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", f"{driver}/libcuda.so.1"], check=True)
folders = [str(root / "lib"), driver], [str(root / "include")]
print(compile_so_from_file(str(root / "driver.c"), "cuda_utils", *folders, ["libcuda.so.1"]))
"""
"""Triton's own call, with an empty library instead of the driver's."""


def test_triton_builds_its_launcher_in_an_engines_container(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    (pod,) = chat.pods()
    built = space.ok("exec", pod["metadata"]["name"], "--", "python", "-c", BUILD).strip()
    assert built.startswith("/tmp/"), built
    assert built.endswith(".so"), built
