"""Requests, probes, metrics and the operator's links use the cluster's own kind of addresses.

`E2E_FAMILIES=IPv6 make e2e-addresses` starts the one-node cluster with pods without IPv4, `IPv6,IPv4` with both.
"""

from __future__ import annotations

import ipaddress
import urllib.request

from support import hubs
from support.clusters import OneNode
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import Document, llmdeployment
from support.release import Release
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url

PORTS = {"gateway": 8080, "operator": 8080}


def test_a_model_is_served_over_the_clusters_kind_of_addresses(
    one_node: OneNode, release: Release, space: Kubectl
) -> None:
    (node,) = one_node.kubectl.items("nodes")
    families = [_version(each["address"]) for each in node["status"]["addresses"] if each["type"] == "InternalIP"]
    chat = deploy(space, llmdeployment("chat", replicas=2))
    chat.wait_ready(2)
    with running_load(release.service("chat"), workers=2) as load:
        load.wait_for(10)
    load.report().assert_all_complete(at_least=10)
    assert [_versions(pod) for pod in chat.pods()] == [families] * 2
    for component, port in PORTS.items():
        for pod in release.pods(component):
            assert _versions(pod) == families
            for each in pod["status"]["podIPs"]:
                assert _answers(each["ip"], port), f"{component} at {each['ip']}"
    # Gateways report the load to the operator on connections of their own.
    until("the operator knows the load", lambda: chat.status().get("load"), timeout_s=60)


def test_a_cached_model_is_fetched_over_the_clusters_kind_of_addresses(release: Release, space: Kubectl) -> None:
    chat = deploy(space, hubs.cached("chat", hubs.start(space, release.image_tag)))
    chat.wait_ready(1)
    assert release.service("chat").ask()


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _versions(pod: Document) -> list[int]:
    return [_version(each["ip"]) for each in pod["status"]["podIPs"]]


def _answers(address: str, port: int) -> bool:
    with urllib.request.urlopen(f"{engine_url(address, port)}/readyz", timeout=10) as answer:
        return bool(answer.status == 200)
