"""Two operators share one Lease: the second takes over, and the two never write at the same time."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterable

from support.audit import AuditLog, Call
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.metrics import total
from support.objects import llmdeployment
from support.processes import kill_pod, of_pod, restart_count
from support.release import Release
from support.waiting import until

TAKEOVER_S = 20.0
"""Time limit in seconds: the duration of the Lease plus five seconds."""
OPERATOR = "pagemill-operator"
METRICS_PORT = 8080


def test_after_the_leader_is_killed_the_other_operator_works_within_the_lease_and_five_seconds(
    one_node: OneNode, release: Release, space: Kubectl, audit: AuditLog
) -> None:
    chat = deploy(space, llmdeployment("spare"))
    chat.wait_ready(1)
    leader = release.leader()
    kill_pod(leader, "pagemill_operator")
    killed_s = time.monotonic()
    chat.scale(2)
    until(
        "the change is reconciled",
        lambda: space.json("get", "deployment/spare-engine")["spec"]["replicas"] == 2,
        timeout_s=TAKEOVER_S,
    )
    print(f"reconciled {time.monotonic() - killed_s:.1f} s after the leader was killed")
    chat.wait_ready(2)
    assert _turns(audit.writes(user=OPERATOR)) <= 2


def test_a_paused_leader_that_wakes_up_writes_nothing(
    one_node: OneNode, release: Release, space: Kubectl, audit: AuditLog
) -> None:
    chat = deploy(space, llmdeployment("spare"))
    chat.wait_ready(1)
    old = release.leader()
    name = old["metadata"]["name"]
    processes = of_pod(old, "pagemill_operator")
    chat.scale(2)  # the leader has work when it is suspended
    for process in processes:
        process.signal(signal.SIGSTOP)
    try:
        until(
            "the other operator leads", lambda: release.leader()["metadata"]["name"] != name, timeout_s=TAKEOVER_S + 5
        )
        chat.scale(3)
        chat.wait_ready(3)
        before = len(audit.writes(user=OPERATOR, pod=name))
    finally:
        for process in processes:
            process.signal(signal.SIGCONT)
    until("the old leader has ended", lambda: _restarts(space, release, name) > restart_count(old), timeout_s=60)
    chat.scale(1)  # only the new leader sees this change
    chat.wait_ready(1)
    assert len(audit.writes(user=OPERATOR, pod=name)) == before, "the old leader wrote after it woke up"
    assert _turns(audit.writes(user=OPERATOR)) == 2, "writes of two operators are mixed"


def test_both_operators_export_the_metrics_of_standard_operator_dashboards(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("spare", replicas=0))
    chat.wait_reason("Ready", "ScaledToZero")
    leader = release.leader()
    labels = {"name": "llmdeployment"}
    leading = {
        pod["metadata"]["name"]: total(pod, METRICS_PORT, "leader_election_master_status", **labels)
        for pod in release.pods("operator")
    }
    assert leading.pop(leader["metadata"]["name"]) == 1
    assert set(leading.values()) == {0}
    reconciled = {"controller": "llmdeployment", "result": "success"}
    assert total(leader, METRICS_PORT, "controller_runtime_reconcile_total", **reconciled) > 0
    assert total(leader, METRICS_PORT, "workqueue_adds_total", **labels) > 0
    assert total(leader, METRICS_PORT, "rest_client_requests_total", code="200", method="GET") > 0
    until(
        "the work queue is empty", lambda: total(leader, METRICS_PORT, "workqueue_depth", **labels) == 0, timeout_s=30
    )


def _turns(writes: Iterable[Call]) -> int:
    """Return how often the writing pod changes, plus one."""
    ordered = sorted(writes, key=lambda call: call.at)
    return len([pod for pod, _ in itertools.groupby(ordered, key=lambda call: call.pod)])


def _restarts(space: Kubectl, release: Release, name: str) -> int:
    return restart_count(space.within(release.namespace).json("get", f"pod/{name}"))
