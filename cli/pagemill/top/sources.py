"""Reads engines' metrics from the `pagemill up` of this machine or from the pods of a cluster.

In a cluster the API server fetches them (`pods/proxy`), so only the API server must be reachable from this machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from pagemill.cluster import ClusterError, connect
from pagemill.top.reading import Reading
from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.kinds import POD
from pagemill_operator.backends.kubernetes.observe.scheduling import unschedulable
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest
from pagemill_operator.backends.local.state_dir import TARGETS_FILE, ScrapeTarget, running

GATEWAYS = "app.kubernetes.io/part-of=pagemill,app.kubernetes.io/component=gateway"
TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class TopError(Exception):
    """There are no engines to show; the message names the cause and the remedy."""


class Source(Protocol):
    where: str
    """The source's description for the output."""

    async def read(self) -> list[Reading]:
        """Return a reading of every engine, including those that do not respond, and of every gateway, with an empty
        name of the pod. Raises `TopError`."""

    async def close(self) -> None: ...


class ThisMachine:
    """The engines of all `pagemill up` processes of this user."""

    def __init__(self, runtime_folder: Path, namespace: str | None = None) -> None:
        self._runtime_folder = runtime_folder
        self._namespace = namespace
        self._session = aiohttp.ClientSession(trust_env=False, timeout=TIMEOUT)
        self.where = "`pagemill up` on this machine" + (f", namespace {namespace}" if namespace else "")

    async def read(self) -> list[Reading]:
        targets = [each for each in local_targets(self._runtime_folder) if self._is_shown(each["labels"])]
        return list(await asyncio.gather(*(self._read(target) for target in targets)))

    def _is_shown(self, labels: dict[str, str]) -> bool:
        if "pod" not in labels:
            return labels.get("job") == "pagemill-gateway"
        namespace, _, _ = labels["variant"].partition("/")
        return self._namespace in (None, namespace)

    async def _read(self, target: ScrapeTarget) -> Reading:
        labels, text, fault = target["labels"], "", ""
        try:
            async with self._session.get(f"http://{target['targets'][0]}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = str(error) or type(error).__name__
        return Reading(labels.get("pod", ""), labels.get("variant", ""), time.monotonic(), text, fault)

    async def close(self) -> None:
        await self._session.close()


class ClusterPods:
    def __init__(self, client: Client, context: str, namespace: str | None) -> None:
        self._client = client
        self._namespace = namespace
        self.where = f"context {context}" + (f", namespace {namespace}" if namespace else "")

    async def read(self) -> list[Reading]:
        try:
            path = POD.path(self._namespace) if self._namespace else "/api/v1/pods"
            listed = await self._client.get(path, {"labelSelector": OWNER_LABEL})
        except ApiError as error:
            remedy = "ask for the role `view`, or name a namespace with --namespace"
            raise TopError(f"{self.where}: the API server refuses: {error}; {remedy}") from None
        except Unreachable as error:
            raise TopError(f"{self.where}: the API server cannot be reached: {error}") from None
        pods = [*listed.get("items", []), *await self._gateways()]
        engines = [(pod, port) for pod in pods if (port := _control_port(pod)) is not None]
        found = await asyncio.gather(*(self._read(pod, port) for pod, port in engines if _runs(pod)))
        return [*found, *(reading for pod, _ in engines if (reading := _without_node(pod)) is not None)]

    async def _gateways(self) -> list[Manifest]:
        """Return the gateways' pods, of any namespace; none where the user may not list them."""
        try:
            listed = await self._client.get("/api/v1/pods", {"labelSelector": GATEWAYS})
        except (ApiError, Unreachable):
            return []
        return list(listed.get("items", []))

    async def _read(self, pod: Manifest, port: int) -> Reading:
        metadata, text, fault = pod["metadata"], "", ""
        namespace, name = metadata["namespace"], metadata["name"]
        try:
            path = POD.path(namespace, f"{name}:{port}", "proxy/metrics")
            text = (await self._client.read(path)).decode("utf-8", "replace")
        except ApiError as error:
            fault = f"{error}; you need the right to get pods/proxy" if error.status == 403 else str(error)
        except Unreachable as error:
            fault = str(error)
        if OWNER_LABEL not in _labels(pod):
            return Reading("", f"{namespace}/{name}", time.monotonic(), text, fault)
        return Reading(name, _deployment(pod), time.monotonic(), text, fault)

    async def close(self) -> None:
        await self._client.close()


async def find_source(
    runtime_folder: Path, context: str | None, kubeconfig: Path | None, namespace: str | None
) -> Source:
    """Return this machine if a `pagemill up` runs here and no cluster is named, else the cluster. Raises `TopError`."""
    if context is None and kubeconfig is None and running(runtime_folder):
        return ThisMachine(runtime_folder, namespace)
    try:
        client, chosen, _ = await connect(context, kubeconfig)
    except ClusterError as error:
        raise TopError(f"no `pagemill up` runs on this machine, and {error}") from None
    return ClusterPods(client, chosen, namespace)


def local_targets(runtime_folder: Path) -> list[ScrapeTarget]:
    """Return the addresses that serve metrics on this machine now."""
    found: list[ScrapeTarget] = []
    for backend in running(runtime_folder):
        try:
            found += json.loads((backend.folder / TARGETS_FILE).read_bytes())
        except (OSError, ValueError):
            continue  # this `pagemill up` is starting or has just exited
    return found


def _runs(pod: Manifest) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def _without_node(pod: Manifest) -> Reading | None:
    """Return the reading of an engine that no node has room for, with the reason; None: it has a node."""
    for each in pod.get("status", {}).get("conditions", []):
        if each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable" and OWNER_LABEL in _labels(pod):
            reason = unschedulable(each.get("message", ""), None).reason
            return Reading(pod["metadata"]["name"], _deployment(pod), time.monotonic(), "", reason, "pending")
    return None


def _labels(pod: Manifest) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels


def _deployment(pod: Manifest) -> str:
    return f"{pod['metadata']['namespace']}/{_labels(pod)[OWNER_LABEL]}"


def _control_port(pod: dict[str, Any]) -> int | None:
    """Return the pod's control port; `None` if the pod is neither an engine nor a gateway, such as a loader."""
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "control"), None)
