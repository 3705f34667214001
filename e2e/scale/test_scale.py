"""With 500 deployments on 200 simulated nodes, the operator's cost is bounded, and it becomes idle at the end.

KWOK's nodes run nothing; their pods, including the gateway's, become Ready as soon as they are scheduled. The test
measures the operator, which runs on the real node and uses a real API server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from support import hollow
from support.audit import AuditLog, Call
from support.clusters import OneNode
from support.deployments import wait_no_children
from support.kubectl import Kubectl
from support.measures import Measures
from support.objects import Document, llmdeployment
from support.processes import Process, of_pod
from support.release import SHARED_NAME, SHARED_NAMESPACE, Release, Releases
from support.waiting import until

DEPLOYMENTS = 500
REPLICAS = 2
NODES = 200
STEADY_S = 300.0
MOST_WRITES_PER_OBJECT = 12
MOST_MEMORY_BYTES = 250 * 1024**2
ALL_READY_TIMEOUT_S = 1200.0
OPERATOR = "pagemill-operator"

pytestmark = [pytest.mark.scale, pytest.mark.timeout(3600)]


@pytest.fixture
def hollow_nodes(one_node: OneNode) -> Iterator[None]:
    with hollow.nodes(NODES):
        yield


@pytest.fixture
def hollow_release(releases: Releases, hollow_nodes: None) -> Iterator[Release]:
    with releases.absent():
        release = releases.new(SHARED_NAME, SHARED_NAMESPACE)
        release.install(values={"gateway": hollow.PLACED})
        yield release
        release.remove()


def test_500_deployments_become_ready_with_few_writes_and_then_cost_nothing(
    hollow_release: Release, space: Kubectl, audit: AuditLog, measures: Measures
) -> None:
    leader = of_pod(hollow_release.leader(), "pagemill_operator")
    audit.mark()
    cpu_before_s, started_s = _cpu_s(leader), time.monotonic()
    space.ok("create", "-f", "-", stdin=_listed(_deployments()), timeout_s=300)
    created_s = time.monotonic() - started_s
    until("all are ready", lambda: _ready(space) == DEPLOYMENTS, timeout_s=ALL_READY_TIMEOUT_S, interval_s=2)
    ready_s = time.monotonic() - started_s
    calls = [call for call in audit.calls() if OPERATOR in call.user]
    writes = _writes(calls)
    measures.record(
        f"{DEPLOYMENTS} deployments x {REPLICAS} replicas on {NODES} hollow nodes",
        created_s=created_s,
        all_ready_s=ready_s,
        operator_cpu_s=_cpu_s(leader) - cpu_before_s,
        operator_peak_mib=_peak_bytes(leader) // 1024**2,
        requests_per_object=len(calls) / DEPLOYMENTS,
        writes_per_object=len(writes) / DEPLOYMENTS,
    )
    print(Counter(f"{call.verb} {call.resource}" for call in writes))
    assert len(writes) <= MOST_WRITES_PER_OBJECT * DEPLOYMENTS
    assert _peak_bytes(leader) < MOST_MEMORY_BYTES

    audit.mark()
    cpu_before_s, rested_from_s = _cpu_s(leader), time.monotonic()
    until("five minutes are over", lambda: time.monotonic() > rested_from_s + STEADY_S, timeout_s=STEADY_S + 10)
    steady = _writes([call for call in audit.calls() if OPERATOR in call.user])
    measures.record(
        f"steady state of {DEPLOYMENTS} deployments over {STEADY_S:.0f} s",
        writes=len(steady),
        operator_cpu_s=_cpu_s(leader) - cpu_before_s,
        operator_peak_mib=_peak_bytes(leader) // 1024**2,
    )
    assert steady == []
    assert _peak_bytes(leader) < MOST_MEMORY_BYTES

    space.delete("llmd --all", timeout_s=ALL_READY_TIMEOUT_S)
    wait_no_children(space, timeout_s=ALL_READY_TIMEOUT_S)


def _deployments() -> list[Document]:
    template = {"spec": hollow.PLACED}
    return [llmdeployment(f"model-{number}", replicas=REPLICAS, template=template) for number in range(DEPLOYMENTS)]


def _listed(documents: list[Document]) -> Document:
    return {"apiVersion": "v1", "kind": "List", "items": documents}


def _ready(space: Kubectl) -> int:
    path = r'jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}'
    return space.ok("get", "llmd", "-o", path).split().count("True")


def _writes(calls: list[Call]) -> list[Call]:
    """Return accepted writes without the periodic renewals of the Lease."""
    return [call for call in calls if call.is_write and call.code < 400 and call.resource != "leases"]


def _cpu_s(processes: list[Process]) -> float:
    return sum(process.cpu_s for process in processes)


def _peak_bytes(processes: list[Process]) -> int:
    return sum(process.peak_rss_bytes for process in processes)
