"""Limits in a Redis with TLS, whose certificate comes from a private authority."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from support.certificates import certificate
from support.clusters import OneNode, program
from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import Service
from support.metrics import total
from support.objects import llmdeployment, probe_pod, secret
from support.release import SHARED_NAMESPACE, Release, Releases
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url
from pagemill_servers.auth import hash_key

REDIS_IMAGE = "docker.io/library/redis:e2e"
PORT, CONTROL_PORT = 6379, 8081
UP = "pagemill_gateway_redis_up"
KEY, LIMIT = "sk-e2e-limited", 4


def _start_redis(space: Kubectl, pair: dict[str, str]) -> None:
    """Run a Redis in the namespace of `space` that accepts TLS only."""
    files = ["--tls-cert-file", "/tls/tls.crt", "--tls-key-file", "/tls/tls.key", "--tls-auth-clients", "no"]
    command = ["redis-server", "--port", "0", "--tls-port", str(PORT), "--save", "", "--protected-mode", "no", *files]
    pod = probe_pod("redis", REDIS_IMAGE, command)
    pod["metadata"]["labels"] = {"app": "redis"}
    pod["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "redis-tls"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "tls", "mountPath": "/tls"}]
    pod["spec"]["containers"][0]["workingDir"] = "/tmp"
    spec = {"selector": {"app": "redis"}, "ports": [{"port": PORT}]}
    space.apply(
        secret("redis-tls", **pair),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "redis"}, "spec": spec},
        pod,
    )
    space.wait("pod/redis", "condition=Ready", 60)


def _are_up(release: Release, value: int) -> bool:
    return all(total(pod, CONTROL_PORT, UP) == value for pod in release.pods("gateway"))


def test_gateways_share_limits_in_a_redis_whose_authority_a_config_map_names(
    one_node: OneNode, releases: Releases, make_space: Callable[..., Kubectl], tmp_path: Path
) -> None:
    program("redis", REDIS_IMAGE)
    release = releases.fresh()
    space, redis = make_space(), make_space()
    server_name = f"redis.{redis.namespace}.svc.cluster.local"
    pair = certificate(tmp_path, "redis", server_name)
    _start_redis(redis, pair)
    system = one_node.kubectl.within(SHARED_NAMESPACE)
    system.apply(
        secret("e2e-redis", url=f"rediss://{server_name}:{PORT}/0"),
        secret("e2e-limited", keys=f"{hash_key(KEY)} tenant=team-a requests_per_minute={LIMIT}\n"),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "authority"},
            "data": {"ca.crt": pair["tls.crt"]},
        },
    )
    gateway = {"apiKeys": {"existingSecret": "e2e-limited"}}
    values = {"redis": {"existingSecret": "e2e-redis"}, "gateway": gateway}
    try:
        release.install(values=values)
        until("no gateway accepts the certificate", lambda: _are_up(release, 0), timeout_s=60)
        values["gateway"] = gateway | {
            "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/authority/ca.crt"}],
            "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
            "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/authority"}],
        }
        release.install(values=values)
        until("each gateway has its Redis", lambda: _are_up(release, 1), timeout_s=60)
        chat = deploy(space, llmdeployment("chat"))
        chat.wait_ready(1)
        pods = release.pods("gateway")
        gateways = [Service(f"{engine_url(pod['status']['podIP'], 8080)}/v1", KEY, "chat") for pod in pods]
        for number in range(LIMIT):
            gateways[number % 2].ask(max_tokens=1)
        for each in gateways:
            with pytest.raises(openai.RateLimitError):
                each.ask(max_tokens=1)
    finally:
        release.install()
