"""Builds the project's images with buildah, each a target of the Dockerfile. `loading` copies them to the node."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import binaries
import containers
import loading
import sources
from layout import HOME

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("gateway", "operator", "engine-cpu")
"""Images that every case needs. `engine`, which has torch and runs on GPUs, is built only if it is named."""
BASE = "docker.io/library/debian:trixie-slim"
SUITE = "trixie"
UNUSED_PATHS = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
ADAPTER = "prometheus-adapter"
PACKAGES_HELP = "On Debian: apt-get install buildah mmdebstrap"
HOST_SETTINGS = ("/etc/ssl/certs", "/etc/pip.conf")
"""Files for access to package registries. They are mounted during the build and are never part of an image."""


class ImageError(Exception):
    """Raised if an image cannot be built; the message contains the end of the output."""


def reference(component: str, tag: str) -> str:
    return f"docker.io/pagemill/{component}:{tag}"


def tag_of_sources() -> str:
    """Return a digest of the images' sources, so that equal sources have equal tags."""
    return sources.digest(ROOT)


def build_all(tag: str, components: Iterable[str] = COMPONENTS) -> dict[str, float]:
    """Build missing images, without a cluster; return the seconds by phase."""
    durations: dict[str, float] = {}
    for component in components:
        if exists(reference(component, tag)):
            continue
        with _timed(durations, "base"):
            make_base()
        with _timed(durations, f"build {component}"):
            build(component, tag)
    return durations


def load_all(tag: str, components: Iterable[str] = COMPONENTS) -> dict[str, float]:
    """Load missing images into the running node; return the seconds by phase."""
    present = containers.image_names()
    durations: dict[str, float] = {}
    for component in components:
        if reference(component, tag) not in present:
            with _timed(durations, f"load {component}"):
                loading.load(reference(component, tag))
    return durations


def forget_others(tag: str) -> list[str]:
    """Remove the images of earlier sources from node and buildah; keep layers that this tag's images share.

    Return why some could not be removed: they only cost disk space.
    """
    problems = []
    for name in sorted(_stale(containers.image_names(), tag)):
        try:
            containers.ctr("images", "rm", name)
        except containers.ContainerError as error:
            problems.append(str(error))
    listed = json.loads(_run("buildah", "images", "--json"))
    for name in sorted(_stale({name for each in listed for name in each["names"] or []}, tag)):
        try:
            _run("buildah", "rmi", name)
        except ImageError as error:
            problems.append(str(error))
    return problems


def _stale(names: set[str], tag: str) -> set[str]:
    return {name for name in names if _is_ours(name) and not name.endswith(f":{tag}")}


def _is_ours(name: str) -> bool:
    return name.startswith("docker.io/pagemill/")


def exists(image: str) -> bool:
    """Whether buildah has the image."""
    argv = ["buildah", "inspect", "--type=image", image]
    try:
        return subprocess.run(argv, capture_output=True).returncode == 0
    except FileNotFoundError as error:
        raise ImageError(f"`buildah` is not on PATH. {PACKAGES_HELP}") from error


def make_base() -> None:
    """Create the Debian slim base from Debian's packages if buildah does not have it yet."""
    if exists(BASE):
        return
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as folder:
        tar = f"{folder}/base.tar"
        excludes = [f"--dpkgopt=path-exclude={path}" for path in UNUSED_PATHS]
        _run("mmdebstrap", "--variant=minbase", "--include=ca-certificates", *excludes, SUITE, tar)
        with _working_container("scratch") as container:
            _run("buildah", "add", "--quiet", container, tar, "/")
            _run("buildah", "config", "--cmd", '["bash"]', container)
            _run("buildah", "commit", "--quiet", container, BASE)


def build(component: str, tag: str, root: Path = ROOT) -> None:
    argv = ["buildah", "build", "--layers", "--isolation=chroot", "--network=host"]
    argv += [f"--volume={path}:{path}:ro" for path in HOST_SETTINGS if os.path.exists(path)]
    argv += [f"--ignorefile={root}/.dockerignore", f"--file={root}/Dockerfile", f"--target={component}"]
    _run(*argv, f"--tag={reference(component, tag)}", str(root))


def make_platform(root: Path, tag: str) -> None:
    """Build and load the gateway and the operator of another checkout, for upgrades from it."""
    for component in ("gateway", "operator"):
        if not exists(reference(component, tag)):
            build(component, tag, root)
    load_all(tag, ("gateway", "operator"))


def derive(image: str, target: str) -> None:
    """Create and load an image that differs by one tiny layer, for a rollout to a new engine version."""
    with _working_container("--pull-never", image) as container:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as marker:
            marker.write(target + "\n")
            marker.flush()
            _run("buildah", "copy", "--quiet", "--chmod=0644", container, marker.name, "/opt/pagemill/derived.txt")
        _run("buildah", "commit", "--quiet", container, target)
    loading.load(target)


def make_redis(target: str) -> None:
    """Create and load the image of the chart's own Redis: Debian's server and client, configured by arguments alone."""
    if not exists(target):
        with _installed("redis-server", "redis-tools") as container:
            _run("buildah", "config", "--entrypoint", "[]", "--cmd", '["redis-server"]', container)
            _run("buildah", "commit", "--quiet", container, target)
    if target not in containers.image_names():
        loading.load(target)


def make_metrics(target: str) -> None:
    """Create and load an image of Debian's Prometheus and the adapter, which serve metrics to an autoscaler."""
    if not exists(target):
        binaries.build([ADAPTER])
        with _installed("prometheus") as container:
            program = str(binaries.bin_dir() / ADAPTER)
            _run("buildah", "copy", "--quiet", "--chmod=0755", container, program, f"/usr/local/bin/{ADAPTER}")
            _run("buildah", "config", "--entrypoint", "[]", "--cmd", '["prometheus"]', container)
            _run("buildah", "commit", "--quiet", container, target)
    if target not in containers.image_names():
        loading.load(target)


@contextmanager
def _installed(*packages: str) -> Iterator[str]:
    """Yield a working container of the base with these Debian packages."""
    make_base()
    with _working_container(BASE) as container:
        install = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(packages)}"
        volumes = [f"--volume={path}:{path}:ro" for path in HOST_SETTINGS if os.path.exists(path)]
        _run("buildah", "run", "--isolation=chroot", "--network=host", *volumes, container, "sh", "-c", install)
        yield container


@contextmanager
def _working_container(*source: str) -> Iterator[str]:
    """Yield a working container and remove it at the end, because it would prevent the removal of its image."""
    container = _run("buildah", "from", *source).strip()
    try:
        yield container
    finally:
        _run("buildah", "rm", container)


def sizes(tag: str) -> dict[str, str]:
    """Return the uncompressed size of each component's image."""
    names = {
        name: each["size"] for each in json.loads(_run("buildah", "images", "--json")) for name in each["names"] or []
    }
    return {each: names[reference(each, tag)] for each in COMPONENTS if reference(each, tag) in names}


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ImageError(f"`{argv[0]}` is not on PATH. {PACKAGES_HELP}") from error
    if done.returncode != 0:
        raise ImageError(f"`{' '.join(argv)}` failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def _timed(durations: dict[str, float], phase: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    durations[phase] = durations.get(phase, 0.0) + time.monotonic() - start
