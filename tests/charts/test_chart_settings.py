"""The rendered settings are valid for the strict parsers of operator and gateway."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pagemill_gateway.config import GatewayConfig
from pagemill_operator.config import OperatorConfig

Variant = Callable[[str], Any]
CHART = Path(__file__).resolve().parents[2] / "charts" / "pagemill"


def text_of(rendered: Any, component: str) -> str:
    text: str = rendered.component("ConfigMap", component)["data"][f"{component}.json"]
    return text


def operator_of(rendered: Any) -> OperatorConfig:
    return msgspec.json.decode(text_of(rendered, "operator"), type=OperatorConfig)


def gateway_of(rendered: Any) -> GatewayConfig:
    return msgspec.json.decode(text_of(rendered, "gateway"), type=GatewayConfig).checked()


def test_every_variant_gives_settings_that_both_accept(rendered: Any) -> None:
    operator, gateway = operator_of(rendered), gateway_of(rendered)
    assert operator.namespace == gateway.kubernetes.keys_secret.namespace == "pagemill-system"
    assert operator.keys_secret == gateway.kubernetes.keys_secret.name
    assert operator.watch_namespaces == gateway.kubernetes.namespaces
    assert operator.gateway_control_port == gateway.control_port
    assert gateway.discovery == "kubernetes"


def test_the_containers_read_the_files_that_are_mounted(rendered: Any) -> None:
    for component in ("operator", "gateway"):
        pod = rendered.component("Deployment", component)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "settings"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "settings"]
        assert volume["configMap"]["name"] == rendered.component("ConfigMap", component)["metadata"]["name"]
        assert container["args"][:2] == ["--settings", f"{mount['mountPath']}/{component}.json"]


def test_ports_and_files_in_the_settings_are_those_of_the_pod(rendered: Any) -> None:
    gateway = gateway_of(rendered)
    pod = rendered.component("Deployment", "gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"data": gateway.port, "control": gateway.control_port}
    mounts = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
    assert str(Path(gateway.kubernetes.last_known_file).parent) in mounts
    if gateway.api_keys_file is not None:
        assert str(Path(gateway.api_keys_file).parent) in [each["mountPath"] for each in container["volumeMounts"]]
    metrics = rendered.component("Deployment", "operator")["spec"]["template"]["spec"]["containers"][0]["ports"][0]
    assert metrics["containerPort"] == operator_of(rendered).metrics_port


def test_the_operator_finds_gateways_by_the_labels_of_their_pods(rendered: Any) -> None:
    labels = rendered.component("Deployment", "gateway")["spec"]["template"]["metadata"]["labels"]
    assert operator_of(rendered).gateway_selector.items() <= labels.items()


def test_engines_recognize_the_operator_by_the_labels_of_its_pods(rendered: Any) -> None:
    labels = rendered.component("Deployment", "operator")["spec"]["template"]["metadata"]["labels"]
    assert operator_of(rendered).operator_selector.items() <= labels.items()


def test_with_tls_to_engines_both_use_one_authority_and_one_name(variant: Variant) -> None:
    rendered = variant("everything")
    operator, gateway = operator_of(rendered).engine_tls, gateway_of(rendered).engine_tls
    assert operator.secret == "engine-certificate"
    assert (operator.ca_file, operator.server_name) == (gateway.ca_file, gateway.server_name)
    assert gateway.server_name == "pagemill-engine"
    for component in ("operator", "gateway"):
        pod = rendered.component("Deployment", component)["spec"]["template"]["spec"]
        mounts = [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]]
        assert str(Path(gateway.ca_file).parent) in mounts
    plain = variant("anonymous")
    assert operator_of(plain).engine_tls.secret == gateway_of(plain).engine_tls.ca_file == ""


def test_there_are_either_keys_or_anonymous_access(variant: Variant) -> None:
    assert gateway_of(variant("anonymous")).allow_anonymous
    assert gateway_of(variant("anonymous")).api_keys_file is None
    guarded = gateway_of(variant("api-keys"))
    assert guarded.api_keys_file is not None
    assert not guarded.allow_anonymous


def test_a_gateway_pod_has_the_configured_connections_and_proxies(variant: Variant) -> None:
    default, configured = gateway_of(variant("anonymous")), gateway_of(variant("everything"))
    assert (default.max_connections, default.trusted_proxies) == (12_000, [])
    assert (configured.max_connections, configured.trusted_proxies) == (6000, ["10.244.0.0/16"])


def test_a_gateway_pod_has_the_configured_number_of_workers(variant: Variant) -> None:
    assert gateway_of(variant("anonymous")).workers == 1
    assert gateway_of(variant("everything")).workers == 3


def test_the_password_of_the_charts_redis_is_read_from_a_file(variant: Variant, tmp_path: Path) -> None:
    """Processes of the node's users can see arguments and environment variables."""
    pod = variant("redis").one("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "env" not in container
    (secret,) = [each["secret"] for each in pod["volumes"] if each["name"] == "password"]
    assert secret["items"] == [{"key": "password", "path": "password"}]
    (tmp_path / "password").write_text("s3 cr$et\n")
    (server := tmp_path / "redis-server").write_text('#!/bin/sh\ncat "$1"; shift; printf "%s " "$@"\n')
    server.chmod(0o755)
    shell, option, script, name = container["command"]
    script = script.replace("/etc/pagemill-redis", str(tmp_path)).replace("/run/redis", str(tmp_path))
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        [shell, option, script, name, *container["args"]],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith('requirepass "s3 cr$et"\n--appendonly yes --save  --dir /data')


def test_with_a_certificate_secret_the_data_port_uses_https(variant: Variant) -> None:
    secured, plain = variant("redis"), variant("anonymous")
    assert gateway_of(plain).tls is None
    tls = gateway_of(secured).tls
    assert tls is not None
    pod = secured.component("Deployment", "gateway")["spec"]["template"]["spec"]
    (volume,) = [each["secret"]["secretName"] for each in pod["volumes"] if each["name"] == "tls"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
    assert (volume, f"{mount['mountPath']}/tls.crt") == ("gateway-tls", tls.cert_file)
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    (port,) = secured.component("Service", "gateway")["spec"]["ports"]
    assert port["appProtocol"] == "https"
    assert operator_of(secured).gateway_url.startswith("https://")
    assert operator_of(plain).gateway_url.startswith("http://")
    arguments = secured.one("Pod")["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--certificate") + 1] == "/etc/pagemill-tls/tls.crt"
    assert arguments[arguments.index("--url") + 1].startswith("https://")


def test_the_gateway_uses_the_configured_redis(variant: Variant) -> None:
    assert gateway_of(variant("anonymous")).redis is None
    bundled, external = variant("redis"), variant("everything")
    redis = gateway_of(bundled).redis
    assert redis is not None
    name = bundled.one("StatefulSet")["metadata"]["name"]
    service = bundled.component("Service", "redis")
    assert redis.url == f"redis://{service['metadata']['name']}.pagemill-system.svc.cluster.local:6379/0"
    assert service["metadata"]["name"] == name == bundled.one("StatefulSet")["spec"]["serviceName"]
    assert redis.keys
    assert redis.expected_gateways == 3
    for rendered, path, key in ((bundled, redis.password_file, "password"), (external, "url", "address")):
        pod = rendered.component("Deployment", "gateway")["spec"]["template"]["spec"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "redis"]
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "redis"]
        (item,) = volume["secret"]["items"]
        file = f"{mount['mountPath']}/{item['path']}"
        assert item["key"] == key
        assert file in (path, gateway_of(external).redis.url_file)  # type: ignore[union-attr]


def test_traces_are_sent_to_the_configured_receiver_with_headers_of_a_secret(variant: Variant) -> None:
    assert gateway_of(variant("anonymous")).tracing is None
    rendered = variant("everything")
    tracing = gateway_of(rendered).tracing
    assert tracing is not None
    assert (tracing.endpoint, tracing.sample_ratio) == ("https://traces.example.com/v1/traces", 0.25)
    pod = rendered.component("Deployment", "gateway")["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "tracing"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tracing"]
    assert volume["secret"]["secretName"] == "receiver"
    (item,) = volume["secret"]["items"]
    assert (item["key"], f"{mount['mountPath']}/{item['path']}") == ("otlp", tracing.headers_file)
    egress = rendered.component("NetworkPolicy", "gateway")["spec"]["egress"]
    receiver = {"to": [{"ipBlock": {"cidr": "10.3.0.0/16"}}], "ports": [{"port": 443, "protocol": "TCP"}]}
    assert receiver in egress


def test_values_are_passed_to_the_settings(variant: Variant) -> None:
    everything, guarded = variant("everything"), variant("api-keys")
    operator, gateway = operator_of(everything), gateway_of(everything)
    assert (operator.log_level, operator.resync_s, operator.workers) == ("DEBUG", 1200, 8)
    assert operator.gateway_url == "https://llm.example.com"
    assert operator.prometheus_namespace_selector == {"kubernetes.io/metadata.name": "monitoring"}
    assert (gateway.drain_delay_s, gateway.drain_timeout_s, gateway.max_requests) == (10, 300, 1000)
    assert gateway.kubernetes.watch_idle_timeout_s == 60
    assert gateway.kubernetes.keys_secret.name == operator.keys_secret, "extra settings must be merged"
    assert operator_of(guarded).engine_image == f"registry.example.com/pagemill/engine:0.1.0-cuda@sha256:{'3' * 64}"
    assert operator_of(guarded).cpu_engine_image == "registry.example.com/pagemill/engine-cpu:0.1.0"
    assert operator_of(guarded).image_pull_secrets == ["registry"]


def test_namespaces_may_be_templates(variant: Variant) -> None:
    assert operator_of(variant("namespaced")).watch_namespaces == ["pagemill-system", "team-a"]


def test_defaults_of_the_chart_equal_those_of_the_operator(render: Callable[..., Any], anonymous: Any) -> None:
    """The defaults in `values.yaml` are the operator's behaviour without settings."""
    rendered = operator_of(render(anonymous))
    plain = OperatorConfig(namespace="pagemill-system", engine_image="x")
    for field in ("lease_duration_s", "renew_deadline_s", "retry_period_s", "resync_s", "key_rotation_s", "log_level"):
        assert getattr(rendered, field) == getattr(plain, field), field
    assert rendered.keys_secret == plain.keys_secret
    assert rendered.lease_name == plain.lease_name


def test_two_releases_share_no_object(render: Callable[..., Any], anonymous: Any) -> None:
    one, other = (operator_of(render(anonymous, name=name)) for name in ("pagemill", "second"))
    assert other.keys_secret == "second-pagemill-keys"
    assert one.lease_name != other.lease_name
    assert one.gateway_selector != other.gateway_selector


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_an_unknown_extra_setting_is_refused_by_the_component(render: Callable[..., Any], component: str) -> None:
    values: dict[str, Any] = {
        "gateway": {"auth": {"allowAnonymous": True}},
        "operator": {},
        "global": {"imageRegistry": "registry.example.com"},
    }
    values[component]["settings"] = {"no_such_setting": 1}
    rendered = render(values)
    with pytest.raises(msgspec.ValidationError, match="no_such_setting"):
        operator_of(rendered) if component == "operator" else gateway_of(rendered)


def test_log_levels_of_the_schema_are_those_of_the_operator(render: Callable[..., Any], anonymous: Any) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    levels = schema["properties"]["operator"]["properties"]["logLevel"]["enum"]
    for level in levels:
        assert operator_of(render({**anonymous, "operator": {"logLevel": level}})).log_level == level.upper()
    assert yaml.safe_load((CHART / "values.yaml").read_text())["operator"]["logLevel"] in levels
