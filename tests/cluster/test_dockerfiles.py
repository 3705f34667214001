"""Properties of every image that its Dockerfile shows; the end-to-end cases run the images."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("engine", "gateway", "operator")


@pytest.fixture(params=COMPONENTS)
def dockerfile(request: pytest.FixtureRequest) -> str:
    """Return the Dockerfile with one line per instruction."""
    return (ROOT / request.param / "Dockerfile").read_text().replace("\\\n", " ")


def shipped_stages(dockerfile: str) -> list[str]:
    """Return the last stage, and others that can be built by their name."""
    stages = re.split(r"^FROM .*$", dockerfile, flags=re.MULTILINE)
    return [stage for stage in stages[1:] if stage is stages[-1] or "ENTRYPOINT" in stage]


def test_an_image_runs_as_an_unprivileged_user_without_a_shell(dockerfile: str) -> None:
    for stage in shipped_stages(dockerfile):
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["65532:65532"]
        (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
        assert re.fullmatch(r'\["python", "-m", "pagemill_[a-z.]+"\]', entrypoint)


def test_everything_installed_is_locked_by_hash(dockerfile: str) -> None:
    installs = re.findall(r"uv pip install [^&\n]*", dockerfile)
    assert installs
    for install in installs:
        assert "--require-hashes" in install or ("--offline" in install and "/wheels/" in install), install


def test_the_lock_is_read_by_the_uv_that_wrote_it(dockerfile: str) -> None:
    assert "COPY release/uv.txt /opt/" in dockerfile
    assert re.findall(r"bin/pip install .*", dockerfile)[0].endswith("--require-hashes -r /opt/uv.txt")


def test_the_lock_stage_has_every_member_of_the_workspace(dockerfile: str) -> None:
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    assert sorted(re.findall(r"^COPY (\S+)/pyproject.toml", dockerfile, re.MULTILINE)) == sorted(members)


def test_compilers_and_uv_are_not_in_the_final_stage(dockerfile: str) -> None:
    for stage in shipped_stages(dockerfile):
        assert "apt-get" not in stage
        assert re.findall(r"^COPY --from=(\S+)", stage, re.MULTILINE)[-1] == "code"
        assert "COPY --from=tools" not in stage


def test_a_release_can_pin_the_base_image(dockerfile: str) -> None:
    """There is one build argument before the first stage, on which every other stage is based."""
    before = dockerfile.split("\nFROM ", 1)[0]
    assert re.findall(r"^ARG (\w+)=", before, re.MULTILINE) == ["BASE"]
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", dockerfile, re.MULTILINE)
    assert stages[0] == ("${BASE}", "python")
    assert {base for base, _ in stages[1:]} <= {name for _, name in stages}


def test_a_dockerfile_contains_no_address(dockerfile: str) -> None:
    assert "://" not in dockerfile


def test_an_engine_finds_a_driver_that_the_node_mounts() -> None:
    """On GKE, the device plugin mounts the node's driver without configuring the linker."""
    dockerfile = (ROOT / "engine" / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[1:]
    base = next(stage for stage in stages if stage.startswith("python AS devices"))
    assert stages[-1].startswith("devices\n"), "the image must be based on the stage that sets it"
    (folders,) = re.findall(r"^ENV LD_LIBRARY_PATH=(\S+)$", base, re.MULTILINE)
    assert "/usr/local/nvidia/lib64" in folders.split(":")
    assert "LD_LIBRARY_PATH" not in stages[-1]


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


def test_every_package_of_a_wheel_is_in_the_images(dockerfile: str) -> None:
    let_through = set((ROOT / ".dockerignore").read_text().splitlines())
    for folder in re.findall(r"^COPY (\S+) \1$", dockerfile, re.MULTILINE):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        assert {f"!{folder}/{package}" for package in packages} <= let_through
