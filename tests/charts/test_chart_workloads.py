"""Pods of operator and gateway: their number, replacement, drain, and services."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pagemill_servers.keys.entries import fault_of

ROOT = Path(__file__).resolve().parents[2]
Variant = Callable[[str], Any]
Render = Callable[..., Any]


def spec_of(rendered: Any, component: str) -> Any:
    return rendered.component("Deployment", component)["spec"]


def container_of(rendered: Any, component: str) -> Any:
    return spec_of(rendered, component)["template"]["spec"]["containers"][0]


def test_each_component_has_two_pods_by_default(variant: Variant) -> None:
    assert [spec_of(variant("anonymous"), each)["replicas"] for each in ("operator", "gateway")] == [2, 2]


def test_with_an_autoscaler_the_number_of_pods_is_not_rendered(variant: Variant) -> None:
    everything = variant("everything")
    assert "replicas" not in spec_of(everything, "gateway")
    scaler = everything.one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == everything.component("Deployment", "gateway")["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"], len(scaler["metrics"])) == (3, 6, 2)


def test_a_disruption_budget_exists_only_for_more_than_one_pod(variant: Variant) -> None:
    assert len(variant("anonymous").all("PodDisruptionBudget")) == 2
    assert variant("single").all("PodDisruptionBudget") == []
    assert variant("service-monitor").all("PodDisruptionBudget") == [], "the budget is disabled"


def test_the_budget_uses_the_autoscalers_minimum(render: Callable[..., Any], anonymous: Any) -> None:
    anonymous["gateway"] |= {"replicas": 5, "autoscaling": {"enabled": True, "minReplicas": 1}}
    anonymous["operator"] = {"replicas": 1}
    assert render(anonymous).all("PodDisruptionBudget") == []


def test_selectors_match_their_own_pods_only(rendered: Any) -> None:
    pods = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]["metadata"]["labels"]
        for each in rendered.all("Deployment")
    }
    for component in ("operator", "gateway"):
        selector = spec_of(rendered, component)["selector"]["matchLabels"]
        matched = [name for name, labels in pods.items() if selector.items() <= labels.items()]
        assert matched == [component]
    service = rendered.one("Service", rendered.component("Deployment", "gateway")["metadata"]["name"])
    assert service["spec"]["selector"].items() <= pods["gateway"].items()


def test_selectors_do_not_change_with_labels(variant: Variant) -> None:
    """A selector is immutable, so it must not contain labels that values can set."""
    selector = spec_of(variant("everything"), "gateway")["selector"]["matchLabels"]
    assert selector.keys() == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/component",
    }


def test_ports_of_services_probes_and_policies_exist(rendered: Any) -> None:
    ports = {
        component: {port["name"] for port in container_of(rendered, component)["ports"]}
        for component in ("operator", "gateway")
    }
    assert ports == {"operator": {"metrics"}, "gateway": {"data", "control"}}
    for component, names in ports.items():
        container = container_of(rendered, component)
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        assert {container[probe]["httpGet"]["port"] for probe in probes} <= names
    gateway = rendered.component("Deployment", "gateway")["metadata"]["name"]
    assert {port["targetPort"] for port in rendered.one("Service", gateway)["spec"]["ports"]} == {"data"}


def test_a_changed_setting_restarts_the_affected_pods(render: Callable[..., Any], anonymous: Any) -> None:
    before = render(anonymous)
    after = render({**anonymous, "operator": {"resyncSeconds": 1200}})

    def template(rendered: Any, component: str) -> Any:
        return spec_of(rendered, component)["template"]

    assert template(before, "operator") != template(after, "operator")
    assert template(before, "gateway") == template(after, "gateway")


def test_a_new_version_of_the_chart_alone_restarts_no_pods(rendered: Any) -> None:
    """The chart's version is in labels of objects, never in those of pods."""
    for component in ("operator", "gateway"):
        assert "helm.sh/chart" not in spec_of(rendered, component)["template"]["metadata"]["labels"]


def test_the_termination_grace_period_covers_the_gateways_whole_drain(variant: Variant) -> None:
    assert spec_of(variant("anonymous"), "gateway")["template"]["spec"]["terminationGracePeriodSeconds"] == 5 + 60 + 20
    assert (
        spec_of(variant("everything"), "gateway")["template"]["spec"]["terminationGracePeriodSeconds"] == 10 + 300 + 20
    )


def test_the_grace_period_also_covers_a_drain_in_extra_settings(render: Render) -> None:
    settings = {"drain_delay_s": 7.5, "drain_timeout_s": 900.25}
    rendered = render(
        {
            "gateway": {"auth": {"allowAnonymous": True}, "settings": settings},
            "global": {"imageRegistry": "registry.example.com"},
        }
    )
    assert spec_of(rendered, "gateway")["template"]["spec"]["terminationGracePeriodSeconds"] == 908 + 20


def test_no_user_label_removes_a_pod_from_its_selector(render: Render, anonymous: Any) -> None:
    labels = {"app.kubernetes.io/part-of": "ours", "team": "a"}
    values = {**anonymous, "commonLabels": labels, "operator": {"podLabels": {"team": "b"}}}
    values["gateway"] = {**anonymous["gateway"], "service": {"labels": {"app.kubernetes.io/instance": "other"}}}
    rendered = render(values)
    for component, team in (("operator", "b"), ("gateway", "a")):
        spec = spec_of(rendered, component)
        found = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= found.items()
        assert (found["team"], found["app.kubernetes.io/part-of"]) == (team, "ours")
    assert (
        rendered.component("Service", "gateway")["metadata"]["labels"].items()
        >= {
            **labels,
            "app.kubernetes.io/instance": "pagemill",
        }.items()
    )


def test_a_new_pod_is_ready_before_an_old_one_is_removed(rendered: Any) -> None:
    for component in ("operator", "gateway"):
        strategy = spec_of(rendered, component)["strategy"]
        assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_the_operator_knows_its_pod_by_name(variant: Variant) -> None:
    container = container_of(variant("anonymous"), "operator")
    assert container["args"][-2:] == ["--identity", "$(POD_NAME)"]
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_pods_spread_over_nodes_unless_set_otherwise(variant: Variant) -> None:
    (spread,) = spec_of(variant("anonymous"), "gateway")["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    (spread,) = spec_of(variant("everything"), "gateway")["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"


def test_extra_values_apply_to_both_components(variant: Variant) -> None:
    everything = variant("everything")
    for component in ("operator", "gateway"):
        pod = spec_of(everything, component)["template"]
        container = container_of(everything, component)
        assert any(each["name"] == "HTTPS_PROXY" for each in container["env"])
        assert any(each["mountPath"] == "/etc/ssl/custom" for each in container["volumeMounts"])
        assert any(each["name"] == "certificates" for each in pod["spec"]["volumes"])
        assert pod["metadata"]["labels"]["example.com/tier"] == "control"
        assert pod["metadata"]["annotations"]["example.com/scrape"] == "no"
        for field in ("affinity", "tolerations", "nodeSelector", "priorityClassName"):
            assert pod["spec"][field]


def test_extra_objects_may_be_templates(variant: Variant) -> None:
    names = {each["metadata"]["name"] for each in variant("everything").all("ConfigMap")}
    assert {"pagemill-extra", "pagemill-llm-text"} <= names


def test_keys_are_mounted_from_the_users_secret_or_that_of_the_chart(variant: Variant) -> None:
    def keys(rendered: Any) -> Any:
        volumes = spec_of(rendered, "gateway")["template"]["spec"]["volumes"]
        return next((each["secret"] for each in volumes if each["name"] == "api-keys"), None)

    assert keys(variant("anonymous")) is None
    theirs = keys(variant("api-keys"))
    assert (theirs["secretName"], theirs["items"]) == ("my-keys", [{"key": "hashes", "path": "keys"}])
    ours = keys(variant("namespaced"))
    made = variant("namespaced").one("Secret", ours["secretName"])
    assert made["stringData"]["keys"].split() == ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    assert [fault_of(line) for line in made["stringData"]["keys"].splitlines()] == [None], "the gateway's own format"


def test_routes_lead_to_the_gateway(variant: Variant) -> None:
    everything = variant("everything")
    service = everything.component("Deployment", "gateway")["metadata"]["name"]
    rules = everything.one("Ingress")["spec"]["rules"]
    assert [rule["host"] for rule in rules] == ["llm.example.com", "pagemill.example.com"]
    assert {rule["http"]["paths"][0]["backend"]["service"]["name"] for rule in rules} == {service}
    (rule,) = everything.one("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service, "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}, "streams must have no time limit"


def test_monitors_use_ports_that_exist(variant: Variant) -> None:
    monitors = variant("everything").all("PodMonitor")
    assert {each["spec"]["podMetricsEndpoints"][0]["port"] for each in monitors} == {"metrics", "control"}
    through_services = variant("service-monitor")
    services = [each for each in through_services.all("Service") if each["spec"].get("clusterIP") == "None"]
    for monitor in through_services.all("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert len([each for each in services if wanted <= each["metadata"]["labels"].items()]) == 1


def test_the_rules_are_those_of_the_rules_file_with_the_values(variant: Variant) -> None:
    plain = yaml.safe_load((ROOT / "charts" / "pagemill" / "files" / "rules.yaml").read_text())
    groups = variant("everything").one("PrometheusRule")["spec"]["groups"]
    assert [group["name"] for group in groups] == [*(group["name"] for group in plain["groups"]), "own"]
    assert groups[0] == plain["groups"][0]


def test_runbook_links_use_the_configured_url(variant: Variant) -> None:
    groups = variant("everything").one("PrometheusRule")["spec"]["groups"]
    urls = {rule["annotations"]["runbook_url"] for rule in groups[-2]["rules"]}
    assert "https://runbooks.example.com/pagemill/PagemillNoHeadroom.md" in urls
    assert all(url.startswith("https://runbooks.example.com/pagemill/Pagemill") for url in urls)


def test_each_dashboard_is_a_config_map_for_grafanas_sidecar(variant: Variant) -> None:
    folder = ROOT / "charts" / "pagemill" / "files" / "dashboards"
    for name in ("autoscaling", "fleet", "gateway", "model", "operator"):
        made = variant("everything").one("ConfigMap", f"pagemill-llm-dashboard-{name}")
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert made["metadata"]["annotations"]["grafana_folder"] == "LLM"
        assert json.loads(made["data"][f"{name}.json"]) == json.loads((folder / f"pagemill-{name}.json").read_text())


def test_a_dashboard_in_the_values_replaces_that_of_the_same_name(render: Render, anonymous: dict[str, Any]) -> None:
    monitoring = {"dashboards": {"enabled": True, "extra": {"fleet": '{"title": "Mine"}'}}}
    rendered = render({**anonymous, "monitoring": monitoring})
    (fleet,) = [each for each in rendered.all("ConfigMap") if each["metadata"]["name"].endswith("dashboard-fleet")]
    assert json.loads(fleet["data"]["fleet.json"]) == {"title": "Mine"}


def test_metrics_keep_their_own_namespace_label(variant: Variant) -> None:
    """The operator's metrics are about deployments of other namespaces."""
    monitors = variant("everything").all("PodMonitor")
    assert all(each["spec"]["podMetricsEndpoints"][0]["honorLabels"] for each in monitors)


def test_rules_and_dashboards_are_rendered_only_if_there_are_any(variant: Variant) -> None:
    everything = variant("everything")
    assert everything.one("PrometheusRule")["spec"]["groups"][-1]["name"] == "own"
    dashboard = everything.one("ConfigMap", "pagemill-llm-dashboard-own")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert variant("anonymous").all("PrometheusRule") == []
