"""Runs the controller of LeaderWorkerSets beside the one-node cluster, as a process with its admission webhooks."""

from __future__ import annotations

import base64
import json
import os
import socket
from typing import Any

import binaries
import credentials
import one_node
import parts
import processes
from layout import NODE_IP, RUN

NAME = "lws"
MODULE = "sigs.k8s.io/lws"
PORT = 9443
GROUP = "leaderworkerset.x-k8s.io"
KINDS = f"/apis/{GROUP}/v1/leaderworkersets"
_PATH = "leaderworkerset-x-k8s-io-v1-leaderworkerset"


def install() -> None:
    """Install the definition and the webhooks, and start the controller."""
    binaries.build([NAME])
    folder = RUN / NAME
    folder.mkdir(exist_ok=True)
    credentials.make_certificate(folder / "tls", [f"IP:{NODE_IP}"])
    definition = binaries.module_folder("lws", MODULE) / "config" / "crd" / "bases" / f"{GROUP}_leaderworkersets.yaml"
    one_node.kubectl("apply", "--server-side", "-f", str(definition))
    one_node.wait("the definition of LeaderWorkerSets", lambda: bool(one_node.kubectl("get", "--raw", KINDS)))
    (folder / "config.yaml").write_text(json.dumps(_configuration(str(folder))))
    start()
    authority = base64.b64encode((folder / "tls.crt").read_bytes()).decode()
    hooks = [_hooks(kind, verb, authority) for kind, verb in (("Mutating", "mutate"), ("Validating", "validate"))]
    one_node.kubectl("apply", "--server-side", "-f", "-", manifest={"apiVersion": "v1", "kind": "List", "items": hooks})


def start() -> None:
    """Start the controller, also again after `stop`; return when its webhooks answer."""
    argv = [str(binaries.path_of(NAME)), f"--kubeconfig={parts.kubeconfig('e2e:lws')}"]
    argv += [f"--config={RUN / NAME / 'config.yaml'}", "--leader-elect=false", "--metrics-bind-address=0"]
    processes.start(RUN, NAME, argv, {**os.environ, "POD_NAMESPACE": "kube-system"})
    one_node.wait("the webhook of LeaderWorkerSets", _answers)


def _answers() -> bool:
    try:
        socket.create_connection((NODE_IP, PORT), 1.0).close()
    except OSError:
        return False
    return True


def stop() -> None:
    """Kill the controller; its webhooks are missing, too."""
    processes.stop(RUN, NAME)


def remove() -> None:
    """Remove the webhooks first, without which no pod could be made; then the definition."""
    for kind in ("mutating", "validating"):
        one_node.kubectl("delete", f"{kind}webhookconfiguration", NAME, "--ignore-not-found")
    one_node.kubectl("delete", f"crd/leaderworkersets.{GROUP}", "--ignore-not-found", "--timeout=60s")
    processes.stop(RUN, NAME)


def _configuration(certificates: str) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "internalCertManagement": {"enable": False},
        "webhook": {"port": PORT, "certDir": certificates},
        "health": {"healthProbeBindAddress": "127.0.0.1:9444"},
    }


def _hooks(kind: str, verb: str, authority: str) -> dict[str, Any]:
    rules = {
        _PATH: {"apiGroups": [GROUP], "resources": ["leaderworkersets"], "operations": ["CREATE", "UPDATE"]},
        "-v1-pod": {"apiGroups": [""], "resources": ["pods"], "operations": ["CREATE"]},
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{kind}WebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            {
                "name": f"{rule['resources'][0]}.{verb}.e2e.pagemill.dev",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "clientConfig": {"url": f"https://{NODE_IP}:{PORT}/{verb}-{path}", "caBundle": authority},
                "rules": [{"apiVersions": ["v1"], **rule}],
                # As the project's own installation, but for pods that belong to no group.
                **({"objectSelector": _IN_GROUP} if path == "-v1-pod" else {}),
            }
            for path, rule in rules.items()
        ],
    }


_IN_GROUP = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
