"""A source behind a proxy with a private certificate, as docs/how-to/run-with-a-mesh-or-proxy.md says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support import hubs, proxy
from support.certificates import certificate
from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import probe_pod, secret
from support.release import Release

OUTSIDE = "hub.outside.test"
"""A name that only the proxy can resolve."""
PORT = 3128


def _start_proxy(space: Kubectl, image_tag: str, hub: str) -> str:
    """Run the proxy in the namespace of `space`; return its URL."""
    arguments = [str(PORT), f"{OUTSIDE}={hub}"]
    pod = probe_pod("proxy", f"docker.io/pagemill/engine-cpu:{image_tag}", ["python", "/proxy/proxy.py", *arguments])
    pod["metadata"]["labels"] = {"app": "proxy"}
    pod["spec"]["volumes"] = [{"name": "proxy", "configMap": {"name": "proxy"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "proxy", "mountPath": "/proxy"}]
    spec = {"selector": {"app": "proxy"}, "ports": [{"port": PORT}]}
    script = {"proxy.py": Path(proxy.__file__).read_text()}
    space.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "proxy"}, "data": script},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "proxy"}, "spec": spec},
        pod,
    )
    space.wait("pod/proxy", "condition=Ready", 60)
    return f"http://proxy.{space.namespace}.svc.cluster.local:{PORT}"


def test_a_source_is_fetched_through_the_proxy_whose_port_the_policy_opens(
    release: Release, make_space: Callable[..., Kubectl], tmp_path: Path
) -> None:
    space, outside = make_space(), make_space()
    pair = certificate(tmp_path, "hub", OUTSIDE)
    hubs.start(outside, release.image_tag, pair)
    address = _start_proxy(outside, release.image_tag, hubs.server_name(outside))
    document = hubs.cached("chat", f"https://{OUTSIDE}:{hubs.PORT}")
    document["spec"]["engine"]["env"] += [
        {"name": "HTTPS_PROXY", "value": address},
        {"name": "SSL_CERT_FILE", "value": "/etc/authority/ca.crt"},
    ]
    template = document["spec"]["template"]["spec"]
    template["volumes"] = [{"name": "authority", "configMap": {"name": "authority"}}]
    template["containers"][0]["volumeMounts"] = [{"name": "authority", "mountPath": "/etc/authority"}]
    data = {"ca.crt": pair["tls.crt"]}
    space.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "authority"}, "data": data},
        secret(hubs.CREDENTIALS, token=hubs.TOKEN),
    )
    chat = deploy(space, document)
    chat.wait_ready(1)
    assert release.service("chat").ask()
    assert f"CONNECT {OUTSIDE}:{hubs.PORT}" in outside.ok("logs", "pod/proxy")
    policy = space.json("get", "networkpolicy/chat-engine")
    opened = {port.get("port") for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
    assert PORT in opened, policy["spec"]["egress"]
