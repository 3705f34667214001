"""One namespace for all rows of a module, which wait for their faults concurrently, as in a cluster with many users."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from support.clusters import Cluster
from support.deployments import Deployed, deploy, wait_no_children
from support.faults import IMAGE_TAG
from support.kubectl import Kubectl
from support.objects import RESTRICTED, Document, namespace
from support.release import Releases
from support.story import Story, watched


@pytest.fixture(scope="module")
def matrix_space(request: pytest.FixtureRequest, cluster: Cluster, releases: Releases) -> Iterator[Kubectl]:
    releases.shared()
    name = f"e2e-{request.module.__name__.rpartition('test_')[2].replace('_', '-')}-{os.getpid()}"
    cluster.kubectl.apply(namespace(name, RESTRICTED))
    here = cluster.kubectl.within(name)
    try:
        here.apply(*getattr(request.module, "BESIDE", ()))
        yield here
        here.ok("delete", "llmd", "--all", "--timeout=300s", timeout_s=330)
        wait_no_children(here)
    finally:
        cluster.kubectl.delete(f"namespace/{name}", "--ignore-not-found")


@pytest.fixture(scope="module")
def story(matrix_space: Kubectl) -> Iterator[Story]:
    """Record when each row's fault occurred and when it was reported."""
    with watched(matrix_space) as story:
        yield story


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, matrix_space: Kubectl, story: Story, image_tag: str) -> dict[str, Deployed]:
    """Apply every row of the module; return the deployments by name."""
    text = json.dumps([row.document for row in request.module.ROWS]).replace(IMAGE_TAG, image_tag)
    documents: list[Document] = json.loads(text)
    return {document["metadata"]["name"]: deploy(matrix_space, document) for document in documents}
