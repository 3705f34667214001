"""Installs the chart, applies a file, waits until its deployments are ready, and removes all of it again.

It knows kubectl and helm of one cluster; `delivering` has brought the images to its nodes.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
from delivering import DeliveryError, run
from needs import DESCRIPTION, NAMESPACE, RELEASE

CHART = images.ROOT / "charts" / "pagemill"
SERVICE = f"service/{RELEASE}-gateway"
SMALL = {"requests": {"cpu": "20m", "memory": "64Mi"}}
"""Requests of operator and gateways that leave a small machine to the engines."""
HELM_TIMEOUT = "10m"
READY_TIMEOUT_S = 900.0
POLL_S = 0.5
DEFINITIONS = ("crd/llmdeployments.pagemill.dev", "crd/loraadapters.pagemill.dev")


@dataclass(frozen=True)
class Serving:
    """A cluster with the programs that reach it."""

    kubectl: tuple[str, ...]
    """The program and the options that choose the cluster."""
    helm: tuple[str, ...]

    def ensure(self, namespaces: Sequence[str]) -> None:
        for name in namespaces:
            if subprocess.run([*self.kubectl, "get", f"namespace/{name}"], capture_output=True).returncode != 0:
                run([*self.kubectl, "create", "namespace", name])

    def install(self, tag: str, namespaces: Sequence[str]) -> None:
        """Install or upgrade the release and wait until its pods are ready."""
        argv = [*self.helm, "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace"]
        argv += ["--reset-values", "--values", "-", "--description", DESCRIPTION, "--wait", "--timeout", HELM_TIMEOUT]
        run(argv, json.dumps(values(tag, namespaces)))

    def apply(self, file: Path) -> None:
        run([*self.kubectl, "apply", "-f", str(file)])

    def wait_ready(self, keys: Sequence[tuple[str, str]], show: Callable[[str], None]) -> None:
        """Wait until every deployment (namespace, name) is ready; `show` gets each new reason why one is not."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        waiting = dict.fromkeys(keys, "")
        while waiting:
            for (namespace, name), before in list(waiting.items()):
                text = run([*self.kubectl, "--namespace", namespace, "get", f"llmd/{name}", "-o", "json"])
                reason = why_not_ready(json.loads(text))
                if reason is None:
                    del waiting[namespace, name]
                    continue
                if reason != before:
                    show(f"{name}: {reason}")
                waiting[namespace, name] = reason
            if waiting and time.monotonic() > deadline:
                late = "; ".join(f"{name}: {reason}" for (_, name), reason in waiting.items())
                raise DeliveryError(f"not ready after {READY_TIMEOUT_S:.0f} s: {late}")
            if waiting:
                time.sleep(POLL_S)

    @contextmanager
    def gateway(self, is_reachable: bool) -> Iterator[str]:
        """Yield a URL of the gateway: its Service's address if this machine reaches it, or a forwarded port."""
        if is_reachable:
            yield f"http://{self._cluster_ip()}"
            return
        argv = [*self.kubectl, "--namespace", NAMESPACE, "port-forward", "--address=127.0.0.1", SERVICE, ":80"]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            try:
                line = process.stdout.readline()  # such as: Forwarding from 127.0.0.1:40321 -> 8080
                if not line.startswith("Forwarding from"):
                    raise DeliveryError(f"`{' '.join(argv)}` failed: {process.stderr.read()[-1000:]}")
                yield f"http://{line.split()[2]}"
            finally:
                process.terminate()
                process.wait()

    def remove(self) -> None:
        """Remove the deployments, the release, the resource's definitions and the namespace."""
        if subprocess.run([*self.kubectl, "get", DEFINITIONS[0]], capture_output=True).returncode == 0:
            run([*self.kubectl, "delete", "loraadapters,llmdeployments", "--all", "--all-namespaces"])
        run([*self.helm, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--ignore-not-found"])
        run([*self.kubectl, "delete", "--ignore-not-found", *DEFINITIONS, f"namespace/{NAMESPACE}"])

    def _cluster_ip(self) -> str:
        text = run([*self.kubectl, "--namespace", NAMESPACE, "get", SERVICE, "-o", "json"])
        address: str = json.loads(text)["spec"]["clusterIP"]
        return f"[{address}]" if ":" in address else address


def values(tag: str, namespaces: Sequence[str]) -> dict[str, Any]:
    """Return the chart's values: images by their tag on the nodes, and no API keys, as on one machine."""
    image = {"registry": "docker.io", "tag": tag}
    return {
        "watchNamespaces": list(namespaces),
        "image": dict.fromkeys(("operator", "gateway", "engine", "engineCpu"), image),
        "operator": {"resources": SMALL},
        "gateway": {"resources": SMALL, "auth": {"allowAnonymous": True}},
    }


def why_not_ready(deployment: dict[str, Any]) -> str | None:
    """Return the reason and message of a deployment that is not ready, None if it is as its last change wants it."""
    status = deployment.get("status") or {}
    ready = next((each for each in status.get("conditions") or () if each["type"] == "Ready"), None)
    if ready is None or ready.get("observedGeneration", 0) < deployment["metadata"]["generation"]:
        return "not seen by the operator yet"
    if ready["status"] == "True":
        return None
    return f"{ready['reason']}: {ready['message']}"
