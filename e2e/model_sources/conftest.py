"""Fixtures: a bucket and a registry with a model, namespaces whose pods may use node folders, and such a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import model_servers
from support.clusters import Cluster
from support.kubectl import Kubectl
from support.model_servers import Bucket


@pytest.fixture(scope="module")
def served(near_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with model_servers.bucket(near_cluster, tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def bucket(served: Bucket) -> Iterator[Bucket]:
    """Return the bucket without a speed limit, which a case may set."""
    yield served
    served.proxy.bytes_per_s = float("inf")


@pytest.fixture
def privileged(make_space: Callable[..., Kubectl]) -> Kubectl:
    """Return a namespace with the bucket's keys and no Pod Security profile, which would forbid node folders."""
    space = make_space(labels={})
    space.apply(model_servers.bucket_keys())
    return space


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    return model_servers.node_folder(tmp_path / "models")
