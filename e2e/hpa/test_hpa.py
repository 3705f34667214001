"""With `mode: External`, Kubernetes's own HorizontalPodAutoscaler writes the replicas through `/scale`.

This cluster serves no metrics API. The autoscaler finds the deployment's scale and its selector; changes of its bounds
change the replicas at once and lose no request; missing metrics remove no replica. `test_hpa_metrics` serves the
metrics.
"""

from __future__ import annotations

import json

from support.autoscalers import autoscaler, condition
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until

DECIDED_S = 90.0
"""Time limit in seconds; the autoscaler runs every 15 s."""


def test_an_hpa_moves_the_replicas_through_the_scale_subresource(release: Release, space: Kubectl) -> None:
    autoscaling = {"mode": "External", "minReplicas": 1, "maxReplicas": 3}
    chat = deploy(space, llmdeployment("chat", autoscaling=autoscaling))
    chat.wait_ready(1)
    with running_load(release.service("chat"), workers=2) as load:
        space.apply(autoscaler("chat", lowest=2, highest=3))
        until("the autoscaler has asked for two", lambda: _wanted(chat) == 2, timeout_s=DECIDED_S)
        chat.wait_ready(2)
        # Within its bounds, the autoscaler requests metrics with the selector that `/scale` reported.
        until("the autoscaler requests metrics", lambda: condition(space, "chat", "ScalingActive"), timeout_s=DECIDED_S)
        assert condition(space, "chat", "AbleToScale")["status"] == "True"
        assert condition(space, "chat", "ScalingActive")["reason"] == "FailedGetExternalMetric"
        assert _wanted(chat) == 2, "missing metrics removed a replica"
        space.apply(autoscaler("chat", lowest=1, highest=1))
        until("the autoscaler has asked for one", lambda: _wanted(chat) == 1, timeout_s=DECIDED_S)
        chat.wait_ready(1)
        until("one pod is left", lambda: len(space.items("pods", "--selector", chat.pod_selector)) == 1, timeout_s=90)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=20)
    assert chat.condition("ScalingActive")["reason"] == "NotConfigured", "the operator made a scaling decision"
    space.delete("hpa/chat")


def test_an_autoscaler_beside_the_operators_own_is_named(release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat", autoscaling={"mode": "Active", "minReplicas": 1, "maxReplicas": 2}))
    chat.wait_ready(1)
    space.apply(autoscaler("chat", lowest=2, highest=2))
    named = "AutoscalerIgnored: the number of replicas that HorizontalPodAutoscaler chat writes is ignored"
    until("Ready names the autoscaler", lambda: named in chat.condition("Ready")["message"], timeout_s=15)
    space.delete("hpa/chat")
    until("Ready names none", lambda: named not in chat.condition("Ready")["message"], timeout_s=15)


def test_in_mode_external_kubectl_scale_changes_the_replicas(release: Release, space: Kubectl) -> None:
    autoscaling = {"mode": "External", "minReplicas": 1, "maxReplicas": 3}
    chat = deploy(space, llmdeployment("chat", autoscaling=autoscaling))
    chat.wait_ready(1)
    with running_load(release.service("chat"), workers=2) as load:
        chat.scale(2)
        chat.wait_ready(2)
        load.wait_for(10)
        assert _wanted(chat) == 2, "the new number of replicas was reverted"
        chat.scale(1)
        chat.wait_ready(1)
        until("one pod is left", lambda: len(space.items("pods", "--selector", chat.pod_selector)) == 1, timeout_s=90)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=15)
    path = f"/apis/pagemill.dev/v1beta1/namespaces/{space.namespace}/llmdeployments/chat/scale"
    scale = json.loads(space.ok("get", "--raw", path))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 1)


def _wanted(chat: Deployed) -> int:
    replicas: int = chat.get()["spec"]["replicas"]
    return replicas
