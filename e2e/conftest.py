"""Fixtures of the end-to-end tests: the cluster, the shared release, a namespace for each case, logs of failures.

A case requests `release` (the installed chart) and `space` (kubectl in a namespace of its own). Everything that the
case deploys in that namespace is deleted when the case ends, and the case fails if an object remains. Cases that
control the cluster request `one_node`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from support import artifacts, clusters, settings
from support.audit import AuditLog
from support.clusters import Cluster, OneNode
from support.deployments import wait_no_children
from support.kubectl import Kubectl
from support.measures import Measures
from support.objects import RESTRICTED, namespace
from support.release import SHARED_NAMESPACE, Release, Releases

HERE = Path(__file__).resolve().parent
CASE_TIMEOUT_S = 600
FAILED = pytest.StashKey[bool]()
_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the timeouts and the order of the cases.

    Cases get more time than unit tests because they wait for pods, and the first one waits for the cluster. Cases that
    install releases of their own come first, so that the shared release is installed only once, after them.
    """
    items.sort(key=lambda item: "release" in getattr(item, "fixturenames", ()))
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(CASE_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    wanted = settings.read(request.config)
    if wanted.context:
        with clusters.foreign(wanted.context, wanted.kubeconfig, tmp_path_factory.mktemp("context")) as theirs:
            yield theirs
            if not wanted.keep_release:
                theirs.kubectl.delete(clusters.DEFINITION, "--ignore-not-found")
    elif wanted.kubeconfig:
        yield clusters.running(Path(wanted.kubeconfig))
    else:
        with clusters.started() as started:
            yield started


@pytest.fixture(scope="session")
def image_tag(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """Return the tag of the images on the nodes; build the images of this checkout if no tag is given."""
    named = settings.read(request.config).image_tag
    assert named or cluster.node is not None, "name the tag of the images on the nodes: --image-tag"
    return named or clusters.build_images()


@pytest.fixture(scope="session")
def releases(request: pytest.FixtureRequest, cluster: Cluster, image_tag: str) -> Iterator[Releases]:
    wanted = settings.read(request.config)
    kept = Releases(cluster, image_tag)
    yield kept
    if not wanted.keep_release:
        kept.close()


@pytest.fixture
def release(releases: Releases) -> Release:
    """Return the shared release: the chart with its defaults and two replicas of each component, all ready."""
    shared = releases.shared()
    shared.wait_ready()
    return shared


@pytest.fixture
def one_node(cluster: Cluster) -> OneNode:
    """Return the control of the cluster's parts and processes; skip the case on other clusters."""
    if cluster.node is None:
        pytest.skip("needs the one-node cluster: this context's processes and audit log are not ours")
    return cluster.node


@pytest.fixture(scope="module")
def near_cluster(cluster: Cluster) -> Cluster:
    """Return the cluster if its pods reach servers of this machine; skip the case on others."""
    if cluster.node is None:
        pytest.skip("needs the one-node cluster: its pods reach servers of this machine")
    return cluster


@pytest.fixture
def unbroken_path(cluster: Cluster) -> None:
    """Skip cases that replace gateways under load if requests go through a forwarded port."""
    if cluster.node is None:
        pytest.skip("a forwarded port ends with the gateway pod behind it, which this case replaces")


@pytest.fixture
def audit(one_node: OneNode) -> AuditLog:
    """Return the audit log, which lists the API calls from now on."""
    log = AuditLog(one_node.audit_log)
    log.mark()
    return log


@pytest.fixture
def measures(request: pytest.FixtureRequest) -> Measures:
    return Measures(settings.read(request.config).artifacts / "measures.jsonl")


@pytest.fixture
def make_space(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Callable[..., Kubectl]]:
    """Return a function that creates a namespace and returns its kubectl: `make_space(labels={...})`.

    The case fails if objects remain in the namespace at the end.
    """
    made: list[str] = []

    def make(labels: dict[str, str] | None = None) -> Kubectl:
        case = re.sub(r"[^a-z0-9]+", "-", request.path.parent.name)
        name = f"e2e-{case}-{os.getpid()}-{next(_numbers)}"
        cluster.kubectl.apply(namespace(name, RESTRICTED if labels is None else labels))
        made.append(name)
        return cluster.kubectl.within(name)

    yield make
    if request.node.stash.get(FAILED, False):
        root = settings.read(request.config).artifacts
        folder = artifacts.folder_of(root, request.node.name)
        artifacts.collect(cluster.kubectl, [*made, SHARED_NAMESPACE], folder)
    try:
        for name in made:
            here = cluster.kubectl.within(name)
            here.ok("delete", "llmd", "--all", "--timeout=300s", timeout_s=330)
            wait_no_children(here)
    finally:
        for name in made:
            cluster.kubectl.delete(f"namespace/{name}", "--ignore-not-found")


@pytest.fixture
def space(make_space: Callable[..., Kubectl]) -> Kubectl:
    """Return kubectl in a namespace of this case, under Pod Security's restricted profile."""
    return make_space()
