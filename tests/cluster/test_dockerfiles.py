"""Properties of every image that the Dockerfile shows; the end-to-end cases run the images."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dockerfile
import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = dockerfile.text()
STAGES = dockerfile.stages()
SHIPPED = {name: body for name, (_, body) in STAGES.items() if "ENTRYPOINT" in body}


def test_each_image_is_a_target_of_its_name() -> None:
    assert tuple(SHIPPED) == dockerfile.IMAGES
    assert list(STAGES)[-1] in dockerfile.IMAGES
    assert len(re.findall(r"^FROM ", TEXT, re.MULTILINE)) == len(STAGES)


def test_an_image_runs_as_an_unprivileged_user_without_a_shell() -> None:
    for stage in SHIPPED.values():
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["65532:65532"]
        (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
        assert re.fullmatch(r'\["python", "-m", "pagemill_[a-z.]+"\]', entrypoint)


def test_everything_installed_is_locked_by_hash() -> None:
    installs = re.findall(r"uv pip install [^&\n]*", TEXT)
    assert installs
    for install in installs:
        assert "--require-hashes" in install or ("--offline" in install and "/wheels/" in install), install


def test_the_lock_is_read_by_the_uv_that_wrote_it() -> None:
    assert "COPY release/uv.txt /opt/" in TEXT
    assert re.findall(r"bin/pip install .*", TEXT)[0].endswith("--require-hashes -r /opt/uv.txt")


def test_the_lock_stage_has_every_member_of_the_workspace() -> None:
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    assert sorted(re.findall(r"^COPY (\S+)/pyproject.toml", TEXT, re.MULTILINE)) == sorted(members)


def test_compilers_and_uv_are_not_in_the_final_stage() -> None:
    for name, stage in SHIPPED.items():
        assert "apt-get" not in stage
        assert re.findall(r"^COPY --from=(\S+)", stage, re.MULTILINE)[-1] == dockerfile.CODE[name]
        assert "COPY --from=tools" not in stage


def test_a_release_can_pin_the_base_image() -> None:
    """There is one build argument before the first stage, on which every other stage is based."""
    before = TEXT.split("\nFROM ", 1)[0]
    assert re.findall(r"^ARG (\w+)=", before, re.MULTILINE) == ["BASE"]
    names = list(STAGES)
    assert (names[0], STAGES[names[0]][0]) == ("python", "${BASE}")
    assert {STAGES[name][0] for name in names[1:]} <= set(names)


def test_the_dockerfile_contains_no_address() -> None:
    assert "://" not in TEXT


def test_an_engine_finds_a_driver_that_the_node_mounts() -> None:
    """On GKE, the device plugin mounts the node's driver without configuring the linker."""
    base, image = STAGES["engine"]
    assert base == "devices", "the image must be based on the stage that sets it"
    (folders,) = re.findall(r"^ENV LD_LIBRARY_PATH=(\S+)$", STAGES[base][1], re.MULTILINE)
    assert "/usr/local/nvidia/lib64" in folders.split(":")
    assert "LD_LIBRARY_PATH" not in image


@pytest.mark.parametrize("component", ["gateway", "operator"])
def test_only_the_engines_image_contains_torch(component: str) -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    needs = {package["name"]: [each["name"] for each in package.get("dependencies", [])] for package in lock["package"]}
    reached: set[str] = set()
    waiting = [f"pagemill-{component}"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += needs.get(name, [])
    assert reached.isdisjoint({"torch", "triton", "transformers"})


def test_every_package_of_a_wheel_is_in_the_images() -> None:
    let_through = set((ROOT / ".dockerignore").read_text().splitlines())
    for folder in re.findall(r"^COPY (\S+) \1$", TEXT, re.MULTILINE):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        assert {f"!{folder}/{package}" for package in packages} <= let_through
