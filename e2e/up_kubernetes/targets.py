"""Decides which cluster `make up-kubernetes` uses: the current context's, if its nodes run on this machine, or our own.

The decision is pure. Contexts of other clusters stay untouched: their nodes would need a registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["kind", "k3d", "minikube", "one-node"]
MINIKUBE = "minikube.sigs.k8s.io"
"""The provider that minikube writes into the extensions of its clusters and contexts."""


@dataclass(frozen=True)
class Target:
    """A cluster whose nodes take images from this machine."""

    kind: Kind
    cluster: str = ""
    """The name by which kind, k3d or minikube (a profile) know it."""
    context: str = ""
    """The kube context; empty for the one-node cluster, which has a kubeconfig of its own."""
    passed_over: str = ""
    """The current context, if it is of no cluster on this machine."""
    is_current: bool = False
    """Whether the one-node cluster is the current context's: then who started it ends it."""

    @property
    def is_one_node(self) -> bool:
        return self.kind == "one-node"


def choose(view: Mapping[str, Any] | None, one_node_server: str) -> Target:
    """Return the cluster of the current context, or the one-node cluster.

    `view` is the output of `kubectl config view --minify -o json`, None without a current context; `one_node_server` is
    the URL of the one-node cluster's API server.
    """
    if view is None:
        return Target("one-node")
    context = str(view.get("current-context") or "")
    for kind in ("kind", "k3d"):
        if context.startswith(f"{kind}-") and context != f"{kind}-":
            return Target(kind, context.removeprefix(f"{kind}-"), context)
    if _is_minikube(view):
        return Target("minikube", context, context)
    if one_node_server in (str(each.get("cluster", {}).get("server")) for each in view.get("clusters") or ()):
        return Target("one-node", is_current=True)
    return Target("one-node", passed_over=context)


def _is_minikube(view: Mapping[str, Any]) -> bool:
    entries = [each.get("cluster") or {} for each in view.get("clusters") or ()]
    entries += [each.get("context") or {} for each in view.get("contexts") or ()]
    extensions = [each for entry in entries for each in entry.get("extensions") or ()]
    return any((each.get("extension") or {}).get("provider") == MINIKUBE for each in extensions)


def load_argv(target: Target, image: str, archive: str | None) -> list[str]:
    """Return the command that copies an image to the nodes: from Docker's store, or from an archive."""
    source = archive or image
    match target.kind:
        case "kind":
            return ["kind", "load", "image-archive" if archive else "docker-image", source, "--name", target.cluster]
        case "k3d":
            return ["k3d", "image", "import", source, "--cluster", target.cluster]
        case "minikube":
            return ["minikube", "image", "load", source, "--profile", target.cluster]
        case "one-node":
            raise ValueError("the one-node cluster loads images by e2e/cluster")


def components(gpus_and_images: list[tuple[int, str | None]]) -> list[str]:
    """Return the images to build for deployments with so many GPUs per replica and these images of their own."""
    engines = {"engine" if gpus else "engine-cpu" for gpus, image in gpus_and_images if not image}
    return ["gateway", "operator", *sorted(engines)]
