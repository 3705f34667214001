"""Kubernetes's HorizontalPodAutoscaler scales by metrics that Pagemill exports, through Prometheus and its adapter.

All settings come from the files in examples/external-scaling: the scrape configuration, the adapter's rules and the
autoscaler. The test runs on the one-node cluster only, because another cluster may have a metrics API already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support import metrics_api
from support.autoscalers import autoscaler, condition, current, rescales
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.measures import Measures
from support.objects import Document, llmdeployment
from support.release import Release
from support.waiting import until

MOST = 3
SEATS = 2
HEAVY = 8
"""Number of concurrent requests: more than the sequence slots of three engines."""
WINDOW_S = 10
SYNC_S = 15.0
"""Seconds between two evaluations of the autoscaler."""
DECIDED_S = 120.0
"""Time limit in seconds for a scrape, the adapter's list of series, and a few evaluations."""
STARTED_S = 300.0
KV = "pagemill_kv_cache_usage_sum"
WAITING = "pagemill_gateway_requests_waiting"
IN_FLIGHT = "pagemill_gateway_requests_in_flight"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def metrics(one_node: OneNode) -> Iterator[None]:
    """Serve external metrics in the cluster."""
    with metrics_api.served(one_node):
        yield


def scaler() -> Document:
    """Return the example's autoscaler for engines with two sequence slots, with windows as short as the case."""
    found = autoscaler("chat", lowest=1, highest=MOST)
    targets = {each["external"]["metric"]["name"]: each["external"]["target"] for each in found["spec"]["metrics"]}
    assert targets.keys() == {KV, WAITING, IN_FLIGHT}
    targets[IN_FLIGHT]["averageValue"] = f"{SEATS * 750}m"
    found["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = WINDOW_S
    return found


def test_an_hpa_follows_the_exported_metrics_to_three_and_back_to_one(
    metrics: None, release: Release, space: Kubectl, measures: Measures
) -> None:
    autoscaling = {"mode": "External", "minReplicas": 1, "maxReplicas": MOST}
    chat = deploy(space, llmdeployment("chat", engine={"maxNumSeqs": SEATS}, autoscaling=autoscaling))
    chat.wait_ready(1, STARTED_S)
    space.apply(scaler())
    until("every metric has a value without traffic", lambda: len(current(space, "chat")) == 3, timeout_s=DECIDED_S)
    assert condition(space, "chat", "ScalingActive")["reason"] == "ValidMetricFound"
    assert (_wanted(chat), rescales(space, "chat")) == (1, [])

    with running_load(release.service("chat"), workers=HEAVY) as heavy:
        began_s = time.monotonic()
        until("the autoscaler has asked for three", lambda: _wanted(chat) == MOST, timeout_s=DECIDED_S)
        ordered_s = time.monotonic()
        chat.wait_ready(MOST, STARTED_S)
        ready_s = time.monotonic()
        until(
            "the windows and two evaluations are over",
            lambda: time.monotonic() > ready_s + WINDOW_S + 2 * SYNC_S,
            timeout_s=60,
        )
        assert _wanted(chat) == MOST, "a busy replica was removed because few requests wait"
        # Three starting engines may delay a scrape on two cores; a missing value changes nothing.
        until("every metric has a value under load", lambda: len(current(space, "chat")) == 3, timeout_s=DECIDED_S)
        seen = current(space, "chat")
        heavy.wait_for(HEAVY)
        assert _wanted(chat) == MOST
        grown = rescales(space, "chat")
    heavy.report().assert_all_complete(at_least=4 * HEAVY)
    assert all("external metric pagemill_" in each and "above target" in each for each in grown), grown

    with running_load(release.service("chat"), workers=1, golden=heavy.golden) as light:
        ended_s = time.monotonic()
        until("the autoscaler has asked for one", lambda: _wanted(chat) == 1, timeout_s=DECIDED_S)
        lowered_s = time.monotonic()
        until("one pod is left", lambda: len(space.items("pods", "--selector", chat.pod_selector)) == 1, timeout_s=120)
        chat.wait_ready(1)
        light.wait_for(5)
        assert _wanted(chat) == 1, "one request at a time did not keep one replica"
    light.report().assert_all_complete(at_least=10)
    assert rescales(space, "chat")[-1] == "New size: 1; reason: All metrics below target"
    assert chat.condition("ScalingActive")["reason"] == "NotConfigured", "the operator made a scaling decision"
    space.delete("hpa/chat")
    measures.record(
        f"HPA by exported metrics, 1 to {MOST} and back",
        ordered_after_s=ordered_s - began_s,
        ready_after_s=ready_s - began_s,
        lowered_after_s=lowered_s - ended_s,
        reported="; ".join(grown),
        seen_busy=str(seen),
        requests=heavy.report().complete + light.report().complete,
        failed=0,
    )


def _wanted(chat: Deployed) -> int:
    replicas: int = chat.get()["spec"]["replicas"]
    return replicas
