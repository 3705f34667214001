"""A restart of etcd under load fails no request, and the operator carries out the next change."""

from __future__ import annotations

from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release


def test_a_restart_of_etcd_interrupts_no_stream(one_node: OneNode, release: Release, space: Kubectl) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    with running_load(release.service("chat")) as load:
        with one_node.without("etcd"):
            load.wait_for(10)
        chat.scale(2)
        chat.wait_ready(2)
        load.wait_for(5)
    load.report().assert_all_complete(at_least=20)
