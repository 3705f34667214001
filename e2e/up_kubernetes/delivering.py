"""Builds the images that are missing and brings them to the nodes. The images' names have a digest of the sources, so
that nothing is built or loaded again that did not change.

The one-node cluster's programs, images and nodes are those of `e2e/cluster`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import images
import one_node
import session
from layout import KEPT
from targets import Target, load_argv


class DeliveryError(Exception):
    """A program failed; the message has the end of its output."""


def to_one_node(tag: str, components: Sequence[str]) -> dict[str, float]:
    """Build what is missing, start the cluster unless it runs, load; return the seconds of each phase."""
    durations: dict[str, float] = {}
    with session.phase(durations, "programs and images"):
        details = session.prepare(tag, components)
    with session.phase(durations, "start the cluster"):
        if not one_node.is_running():
            if KEPT.exists():
                one_node.down()  # what a restart of the machine or a crash left
            one_node.up()
            KEPT.touch()
    with session.phase(durations, "load the images"):
        details |= images.load_all(tag, components)
    return details | durations


def to_context(target: Target, builder: str, tag: str, components: Sequence[str]) -> dict[str, float]:
    """Build what is missing with `builder` (docker or buildah), load what a node lacks; return seconds by phase."""
    durations: dict[str, float] = {}
    names = {each: images.reference(each, tag) for each in components}
    present = on_all_nodes(run(["kubectl", "--context", target.context, "get", "nodes", "-o", "json"]))
    for component, name in names.items():
        if name in present:
            continue
        with session.phase(durations, f"build {component}"):
            _build(builder, component, tag)
        with session.phase(durations, f"load {component}"):
            _load(target, builder, name)
    return durations


def on_all_nodes(listed: str) -> set[str]:
    """Return the names of the images that every node of a NodeList (JSON) has."""
    nodes = json.loads(listed)["items"]
    found = [
        {name for image in node["status"].get("images") or () for name in image.get("names") or ()} for node in nodes
    ]
    return set.intersection(*found) if found else set()


def _build(builder: str, component: str, tag: str) -> None:
    if builder == "buildah":
        if not images.exists(images.reference(component, tag)):
            images.build(component, tag)
        return
    name = images.reference(component, tag)
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode != 0:
        run(["docker", "build", "--target", component, "--tag", name, str(images.ROOT)])


def _load(target: Target, builder: str, name: str) -> None:
    if builder == "docker":
        run(load_argv(target, name, None))
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = str(Path(folder) / "image.tar")
        run(["buildah", "push", "--quiet", name, f"docker-archive:{archive}:{name}"])
        run(load_argv(target, name, archive))


def run(argv: list[str], stdin: str | None = None) -> str:
    """Run a program; return its output. Raises `DeliveryError`."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise DeliveryError(f"`{argv[0]}` is not on PATH") from error
    if done.returncode != 0:
        raise DeliveryError(f"`{' '.join(argv)}` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
