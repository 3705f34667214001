"""TLS between gateways and engines is turned on, renewed and turned off under load without a failed request."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import certificate
from support.clusters import OneNode
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import Document, llmdeployment
from support.release import Release, Releases
from support.waiting import until

SECRET = "engine-certificate"
SERVER_NAME = "pagemill-engine"
"""The chart's default of `engineTls.serverName`."""
MODEL = "chat"
HTTPS_PORTS = {8443, 8444}
SECRET_UPDATE_S = 240.0
"""Seconds until a kubelet updates a changed Secret in pods: its sync period plus the age of its cache."""


@pytest.fixture
def changed(releases: Releases) -> Iterator[Release]:
    """Install a release for this case alone, because the case changes its settings."""
    yield releases.fresh()
    releases.close()


@pytest.mark.timeout(1500)
def test_tls_to_engines_is_turned_on_renewed_and_turned_off_without_a_lost_answer(
    one_node: OneNode, changed: Release, space: Kubectl, tmp_path: Path
) -> None:
    chat = deploy(space, llmdeployment(MODEL, replicas=2))
    chat.wait_ready(2)
    assert not listening(chat) & HTTPS_PORTS
    service = changed.service(MODEL)
    first, second = certificate(tmp_path, "first", SERVER_NAME), certificate(tmp_path, "second", SERVER_NAME)
    keep(changed, space, first, first["tls.crt"])

    old = chat.pods()
    with running_load(service) as load:
        changed.install(values={"engineTls": {"secret": SECRET}})
        chat.wait_rolled_out(old)
        load.wait_for(10)
    load.report().assert_all_complete(at_least=20)
    assert listening(chat) == HTTPS_PORTS
    assert {served(pod) for pod in chat.pods()} == {first["tls.crt"]}

    both = first["tls.crt"] + second["tls.crt"]
    with running_load(service) as load:
        keep(changed, space, first, both)
        until("gateways have both authorities", lambda: authorities(changed) == {both}, timeout_s=SECRET_UPDATE_S)
        keep(changed, space, second, both)
        until(
            "engines serve the new certificate",
            lambda: {served(pod) for pod in chat.pods()} == {second["tls.crt"]},
            timeout_s=SECRET_UPDATE_S,
        )
        load.wait_for(10)
    load.report().assert_all_complete(at_least=20)

    old = chat.pods()
    with running_load(service) as load:
        changed.install()
        chat.wait_rolled_out(old)
        load.wait_for(10)
    load.report().assert_all_complete(at_least=20)
    assert not listening(chat) & HTTPS_PORTS


def keep(release: Release, space: Kubectl, pair: dict[str, str], authority: str) -> None:
    """Write the Secret where engines read their certificate and where gateways read `ca.crt`."""
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": SECRET},
        "stringData": {**pair, "ca.crt": authority},
    }
    for kubectl in (space, release.cluster.kubectl.within(release.namespace)):
        kubectl.apply(document)


def listening(deployed: Deployed) -> set[int]:
    """Return the ports that the engines' containers declare."""
    containers = [pod["spec"]["containers"][0] for pod in deployed.pods()]
    return {port["containerPort"] for container in containers for port in container["ports"]}


def served(pod: Document) -> str:
    """Return the certificate on the pod's data port, or "" if the port does not answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((pod["status"]["podIP"], min(HTTPS_PORTS)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=SERVER_NAME) as connection,
        ):
            return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
    except OSError:
        return ""


def authorities(release: Release) -> set[str]:
    """Return the `ca.crt` of each gateway pod."""
    kubectl = release.cluster.kubectl.within(release.namespace)
    read = "import pathlib; print(pathlib.Path('/etc/pagemill-engine-ca/ca.crt').read_text(), end='')"
    names = [pod["metadata"]["name"] for pod in release.pods("gateway")]
    return {kubectl.run("exec", name, "--", "python", "-c", read).stdout for name in names}
