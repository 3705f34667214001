"""Which cluster `make up-kubernetes` uses, what it builds and loads, and when a deployment is ready."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]
OWN = "https://10.200.0.1:6443"


def view(context: str, server: str = "https://example.com", provider: str = "") -> dict[str, Any]:
    """Return what `kubectl config view --minify -o json` prints."""
    extensions = [{"name": "cluster_info", "extension": {"provider": provider}}] if provider else None
    return {
        "current-context": context,
        "clusters": [{"name": context, "cluster": {"server": server, "extensions": extensions}}],
        "contexts": [{"name": context, "context": {"cluster": context, "extensions": None}}],
    }


@pytest.mark.parametrize(
    ("seen", "kind", "cluster", "context"),
    [
        (None, "one-node", "", ""),
        (view("kind-dev"), "kind", "dev", "kind-dev"),
        (view("k3d-a-b"), "k3d", "a-b", "k3d-a-b"),
        (view("work", provider="minikube.sigs.k8s.io"), "minikube", "work", "work"),
    ],
)
def test_clusters_of_this_machine_are_used(
    module: Module, seen: dict[str, Any] | None, kind: str, cluster: str, context: str
) -> None:
    target = module("targets").choose(seen, OWN)
    assert (target.kind, target.cluster, target.context, target.passed_over) == (kind, cluster, context, "")
    assert not target.is_current


@pytest.mark.parametrize("seen", [view("production"), view("kind-"), view("minikube"), view("", provider="else")])
def test_contexts_of_other_clusters_stay_untouched(module: Module, seen: dict[str, Any]) -> None:
    """Also one that has only the name of a minikube: what it is says its entry, and its nodes take no images."""
    target = module("targets").choose(seen, OWN)
    assert (target.kind, target.context) == ("one-node", "")
    assert target.passed_over == seen["current-context"]


def test_a_one_node_cluster_that_the_user_chose_is_used_and_not_ended(module: Module) -> None:
    target = module("targets").choose(view("e2e", server=OWN), OWN)
    assert (target.kind, target.is_current, target.passed_over) == ("one-node", True, "")


def test_only_engines_that_run_are_built(module: Module) -> None:
    components = module("targets").components
    assert components([(0, None)]) == ["gateway", "operator", "engine-cpu"]
    assert components([(1, None), (0, None), (0, None)]) == ["gateway", "operator", "engine", "engine-cpu"]
    assert components([(0, "example.com/engine:1")]) == ["gateway", "operator"]


@pytest.mark.parametrize(
    ("kind", "docker", "buildah"),
    [
        ("kind", "kind load docker-image IMAGE --name c", "kind load image-archive FILE --name c"),
        ("k3d", "k3d image import IMAGE --cluster c", "k3d image import FILE --cluster c"),
        ("minikube", "minikube image load IMAGE --profile c", "minikube image load FILE --profile c"),
    ],
)
def test_images_are_loaded_by_the_clusters_own_program(module: Module, kind: str, docker: str, buildah: str) -> None:
    targets = module("targets")
    target = targets.Target(kind, "c", "context")
    assert " ".join(targets.load_argv(target, "IMAGE", None)) == docker
    assert " ".join(targets.load_argv(target, "IMAGE", "FILE")) == buildah


def test_an_image_is_there_if_every_node_has_it(module: Module) -> None:
    nodes = [{"status": {"images": [{"names": names}, {"names": None}]}} for names in (["a", "b"], ["b", "c"])]
    on_all_nodes = module("delivering").on_all_nodes
    assert on_all_nodes(json.dumps({"items": nodes})) == {"b"}
    assert on_all_nodes(json.dumps({"items": [*nodes, {"status": {}}]})) == set()
    assert on_all_nodes(json.dumps({"items": []})) == set()


def deployment(status: str, *, observed: int = 2) -> dict[str, Any]:
    ready = {
        "type": "Ready",
        "status": status,
        "reason": "NoNodeFits",
        "message": "a reason",
        "observedGeneration": observed,
    }
    return {"metadata": {"generation": 2}, "status": {"conditions": [{"type": "Other", "status": "True"}, ready]}}


def test_a_deployment_is_ready_only_as_its_last_change_wants_it(module: Module) -> None:
    why = module("serving").why_not_ready
    assert why(deployment("True")) is None
    assert why(deployment("False")) == "NoNodeFits: a reason"
    assert why(deployment("True", observed=1)) == "not seen by the operator yet"
    assert why({"metadata": {"generation": 1}}) == "not seen by the operator yet"


def test_the_release_has_the_images_of_the_nodes_and_serves_the_files_namespaces(module: Module) -> None:
    values = module("serving").values("abc", ["team"])
    assert values["watchNamespaces"] == ["team"]
    images = {(name, each["registry"], each["tag"]) for name, each in values["image"].items()}
    assert images == {(name, "docker.io", "abc") for name in ("operator", "gateway", "engine", "engineCpu")}
