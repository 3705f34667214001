"""NetworkPolicies of operator and gateway: allowed connections in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Variant = Callable[[str], Any]
ENGINE = {"matchLabels": {"app.kubernetes.io/name": "pagemill-engine"}}


def test_only_gateways_may_connect_to_the_redis_of_the_chart(variant: Any) -> None:
    rendered = variant("redis")
    redis = rendered.component("NetworkPolicy", "redis")["spec"]
    gateway = rendered.component("Deployment", "gateway")["spec"]["selector"]["matchLabels"]
    assert redis["egress"] == []
    assert redis["ingress"] == [
        {"ports": [{"port": "redis", "protocol": "TCP"}], "from": [{"podSelector": {"matchLabels": gateway}}]}
    ]
    labels = rendered.one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert redis["podSelector"]["matchLabels"].items() <= labels.items()
    (allowed,) = [
        rule
        for rule in rendered.component("NetworkPolicy", "gateway")["spec"]["egress"]
        if rule["ports"] == [{"port": 6379, "protocol": "TCP"}]
    ]
    assert allowed["to"] == [{"podSelector": redis["podSelector"]}]


def ports(rule: dict[str, Any]) -> set[Any]:
    return {each["port"] for each in rule.get("ports", [])}


def policy(rendered: Any, component: str) -> Any:
    return rendered.component("NetworkPolicy", component)["spec"]


def rule_for(rules: list[Any], port: Any) -> Any:
    (found,) = [rule for rule in rules if port in ports(rule)]
    return found


def test_both_directions_are_restricted_by_default(variant: Variant) -> None:
    for component in ("operator", "gateway"):
        assert policy(variant("anonymous"), component)["policyTypes"] == ["Ingress", "Egress"]
    assert variant("service-monitor").all("NetworkPolicy") == [], "the policies are disabled"


def test_all_clients_may_connect_to_the_data_port_and_few_to_the_control_port(variant: Variant) -> None:
    ingress = policy(variant("anonymous"), "gateway")["ingress"]
    assert "from" not in rule_for(ingress, "data")
    operator, prometheus = rule_for(ingress, "control")["from"]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert "namespaceSelector" not in operator, "the operator of this release, in this namespace"
    assert prometheus["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}


def test_clients_can_be_restricted_and_the_test_pod_is_one_of_them(variant: Variant) -> None:
    apps, test = rule_for(policy(variant("everything"), "gateway")["ingress"], "data")["from"]
    assert apps["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "apps"}
    labels = variant("everything").component("Pod", "test")["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_gateway_may_connect_to_engines_in_all_served_namespaces(variant: Variant) -> None:
    def engines(rendered: Any) -> Any:
        rule = rule_for(policy(rendered, "gateway")["egress"], 8000)
        assert ports(rule) == {8000, 8001, 8443, 8444}
        (peer,) = rule["to"]
        assert peer["podSelector"] == ENGINE
        return peer["namespaceSelector"]

    assert engines(variant("all-namespaces")) == {}
    (expression,) = engines(variant("namespaced"))["matchExpressions"]
    assert expression["values"] == ["pagemill-system", "team-a"]


def test_the_operator_may_connect_only_to_control_ports_of_gateways_and_engines(variant: Variant) -> None:
    egress = policy(variant("all-namespaces"), "operator")["egress"]
    (gateway,) = rule_for(egress, "control")["to"]
    assert gateway["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    (engines,) = rule_for(egress, 8001)["to"]
    assert (engines["podSelector"], engines["namespaceSelector"]) == (ENGINE, {})
    assert not any(8000 in ports(rule) for rule in egress)
    (expression,) = rule_for(policy(variant("namespaced"), "operator")["egress"], 8001)["to"][0]["namespaceSelector"][
        "matchExpressions"
    ]
    assert expression["values"] == ["pagemill-system", "team-a"]


def test_the_address_of_the_api_server_can_be_restricted(variant: Variant) -> None:
    rule = rule_for(policy(variant("everything"), "operator")["egress"], 6443)
    assert rule["to"] == [{"ipBlock": {"cidr": "10.96.0.1/32"}}]
    assert ports(rule) == {6443}


def test_all_components_allow_the_same_prometheus(variant: Variant) -> None:
    everything = variant("everything")
    (operator,) = rule_for(policy(everything, "operator")["ingress"], "metrics")["from"]
    gateway = rule_for(policy(everything, "gateway")["ingress"], "control")["from"][1]
    assert operator == gateway
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
