"""A Helm release of the chart: installed with small values and a real API key, used from outside, uninstalled.

`Releases` keeps the one release that most cases share; cases that install in another way remove it first, and the next
case that needs it installs it again.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.clusters import RELEASE_NAME, RELEASE_NAMESPACE, Cluster
from support.forwarding import forwarded
from support.load import Service
from support.objects import Document, merged, namespace, secret
from support.waiting import until

from pagemill_protocol.engine_ports import engine_url

CHART = Path(__file__).resolve().parents[2] / "charts" / "pagemill"
SHARED_NAME = RELEASE_NAME
SHARED_NAMESPACE = RELEASE_NAMESPACE
KEYS_SECRET = "e2e-api-keys"
KEYS_ENTRY = "keys"
PLAIN_ENTRY = "plain"
HELM_TIMEOUT_S = 300.0
WAITING_VERBS = {"install", "upgrade", "rollback", "uninstall", "test"}


@dataclass
class Release:
    """One release, installed or removed."""

    cluster: Cluster
    name: str
    namespace: str
    image_tag: str

    @property
    def api_key(self) -> str:
        return f"sk-e2e-{self.name}"

    def values(self) -> Document:
        """Return two replicas of each component, requests that fit a laptop, and the images on the node."""
        image = {"registry": "docker.io", "tag": self.image_tag, "pullPolicy": "IfNotPresent"}
        engine_cpu = {name: image[name] for name in ("registry", "tag")}
        small = {"requests": {"cpu": "20m", "memory": "64Mi"}}
        return {
            "watchNamespaces": [],  # each case creates a namespace of its own
            "image": dict.fromkeys(("operator", "gateway", "engine"), image) | {"engineCpu": engine_cpu},
            "operator": {"resources": small},
            "gateway": {"resources": small, "apiKeys": {"existingSecret": KEYS_SECRET}},
            "tests": {"apiKeySecret": {"name": KEYS_SECRET, "key": PLAIN_ENTRY}},
        }

    def prepare(self) -> None:
        """Create the namespace and the Secret of API keys, which belong to the user."""
        kubectl = self.cluster.kubectl
        kubectl.apply(namespace(self.namespace))
        digest = hashlib.sha256(self.api_key.encode()).hexdigest()
        kubectl.within(self.namespace).apply(
            secret(KEYS_SECRET, **{KEYS_ENTRY: f"{digest}\n", PLAIN_ENTRY: self.api_key})
        )

    def install(self, *, chart: Path = CHART, values: Document | None = None, arguments: tuple[str, ...] = ()) -> None:
        """Install or upgrade, and wait until every pod of the release is ready."""
        self.prepare()
        settings = json.dumps(merged(self.values(), values or {}))
        self.helm("upgrade", "--install", self.name, str(chart), "--values", "-", "--wait", *arguments, stdin=settings)

    def uninstall(self) -> None:
        self.helm("uninstall", self.name, "--wait", "--ignore-not-found")

    def remove(self) -> None:
        """Uninstall, and delete the namespace with what a release leaves on purpose."""
        self.uninstall()
        self.cluster.kubectl.delete(f"namespace/{self.namespace}", "--ignore-not-found")

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        kubectl = self.cluster.kubectl
        where = ["--kubeconfig", kubectl.kubeconfig, "--namespace", self.namespace]
        where += ["--kube-context", kubectl.context] if kubectl.context else []
        waiting = ["--timeout", f"{HELM_TIMEOUT_S:.0f}s"] if arguments[0] in WAITING_VERBS else []
        argv = [self.cluster.helm, *where, *arguments, *waiting]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=HELM_TIMEOUT_S + 30)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}{done.stdout[-2000:]}"
        return done.stdout

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Return the pods of the operator or the gateway that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found = self.cluster.kubectl.within(self.namespace).items("pods", "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def leader(self) -> dict[str, Any]:
        """Return the operator pod that holds the Lease."""
        kubectl = self.cluster.kubectl.within(self.namespace)

        def holder() -> dict[str, Any] | None:
            lease = kubectl.run("get", "lease/pagemill-operator", "-o", "jsonpath={.spec.holderIdentity}").stdout
            pods = self.pods("operator")
            return next((pod for pod in pods if lease and pod["metadata"]["name"] in lease), None)

        return until("an operator pod holds the Lease", holder, timeout_s=60) or {}

    def wait_ready(self) -> None:
        """Wait until the node, the pods and the Service have recovered from what an earlier case did to them."""
        self.cluster.kubectl.wait("nodes --all", "condition=Ready")
        for component in ("gateway", "operator"):
            until(f"the {component} is ready", partial(self._is_ready, component), timeout_s=120)
        if self.cluster.node is not None:
            until("the gateways' Service accepts connections", self._accepts)

    def _is_ready(self, component: str) -> bool:
        states = [pod["status"].get("conditions", []) for pod in self.pods(component)]
        return all(any(state["type"] == "Ready" and state["status"] == "True" for state in each) for each in states)

    def _accepts(self) -> bool:
        try:
            socket.create_connection((self._cluster_ip(), 80), timeout=2).close()
        except OSError:
            return False
        return True

    def service(self, model: str) -> Service:
        """Return the gateway's Service as a client outside the pods reaches it."""
        return Service(f"{self._address()}/v1", self.api_key, model)

    def gateway_pod(self, pod: dict[str, Any], model: str) -> Service:
        """Return one gateway pod, bypassing the Service; only where pod addresses are reachable."""
        return Service(f"{engine_url(pod['status']['podIP'], 8080)}/v1", self.api_key, model)

    def _address(self) -> str:
        if self.cluster.node is None:
            return forwarded(self.cluster.kubectl.within(self.namespace), f"service/{self.name}-gateway")
        return engine_url(self._cluster_ip(), 80)

    def _cluster_ip(self) -> str:
        kubectl = self.cluster.kubectl.within(self.namespace)
        address: str = kubectl.json("get", f"service/{self.name}-gateway")["spec"]["clusterIP"]
        return address


class Releases:
    """The shared release: installed when a case needs it, and removed when a case needs its place."""

    def __init__(self, cluster: Cluster, image_tag: str) -> None:
        self._shared = Release(cluster, SHARED_NAME, SHARED_NAMESPACE, image_tag)
        self._installed = False
        self._begun = False
        """Whether something may be installed, even only half of an installation that failed."""

    def shared(self) -> Release:
        if not self._installed:
            self.close()
            self._begun = True
            self._shared.install()
            self._installed = True
        return self._shared

    def fresh(self) -> Release:
        """Return the shared release, newly installed."""
        self.close()
        return self.shared()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Remove the shared release and keep it removed while the block runs."""
        self.close()
        yield

    def new(self, name: str, namespace: str) -> Release:
        """Return another release, which is not installed yet; the shared one must be removed first."""
        return Release(self._shared.cluster, name, namespace, self._shared.image_tag)

    def close(self) -> None:
        self._installed = False
        if self._begun:
            self._shared.remove()
            self._begun = False
