"""`spec.template`: finds overrides of the pod template that would break the operator's pods, or weaken their security.

All else of a PodSpec may be overridden; `backends.kubernetes.render` merges it. That package writes the names defined
here into every pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from pagemill_crds.models import LLMDeploymentSpec
from pagemill_operator.plan.types import Problem
from pagemill_protocol.engine_ports import CONTROL_PORT, DATA_PORT, TLS_CONTROL_PORT, TLS_DATA_PORT
from pagemill_protocol.resource.quantities import duration_seconds

CONTAINER = "engine"
GRACE_MARGIN_S = 15
"""Seconds that a pod gets beyond its drain time to end: preStop, last bytes, exit."""
OWN_PREFIX = "pagemill.dev/"
OWN_LABELS = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "managed-by"))
SETTINGS_PATH, TOKEN_PATH, MODEL_PATH = "/etc/pagemill", "/var/run/secrets/pagemill", "/models"
KERNELS_PATH, KERNELS_VOLUME = "/var/cache/pagemill/kernels", "kernels"
"""Path of the engine's compiled kernels, and the folder of the model's volume that holds them."""
TLS_PATH = "/var/run/secrets/pagemill-tls"
ADAPTERS_PATH = "/etc/pagemill-adapters"
OWN_VOLUMES = {
    "settings": SETTINGS_PATH,
    "adapters": ADAPTERS_PATH,
    "token": TOKEN_PATH,
    "engine-tls": TLS_PATH,
    "model": MODEL_PATH,
}
"""Volume -> mount path."""
OWN_PORTS = ("data", "control")
OWN_PORT_NUMBERS = (DATA_PORT, CONTROL_PORT, TLS_DATA_PORT, TLS_CONTROL_PORT)
MERGED_LISTS = ("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets")
FIELD = "spec.template"
_OWN_FIELDS = {
    "args": "the engine reads its settings from the operator's file; use spec.engine.extraArgs",
    "image": "set spec.engine.image instead",
    "terminationMessagePath": "the operator reads there why the engine ended; remove it",
    "terminationMessagePolicy": "the operator reads the engine's own message, not its log; remove it",
}
"""Fields of the engine's container that no override may change, and what to do instead."""
_SECURITY_FIELDS = {
    "command": "it must start the engine and pass SIGTERM on to it; otherwise running requests are cut off",
    "livenessProbe": "merged into the operator's: an engine that loads or drains must not be restarted",
    "readinessProbe": "merged into the operator's: replicas count as ready by it",
    "startupProbe": "merged into the operator's: an engine that takes longer is restarted",
}


def file_url(path: str) -> str:
    return "file://" + quote(path.rstrip("/"))


def mounted_file(source: str) -> str:
    """Return where the pods have a `pvc://` source on the claim of their model."""
    _, _, rest = source.partition("://")
    return file_url(f"{MODEL_PATH}/{rest.partition('/')[2]}")


def template_problems(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield overrides that would break the pod's identity, its token, its settings or its drain."""
    template = spec.template
    if template is None:
        return
    if template.metadata is not None:
        yield from _own_names("labels", template.metadata.labels)
        yield from _own_names("annotations", template.metadata.annotations)
    if template.spec is not None:
        yield from _pod_problems(template.spec, duration_seconds(spec.rollout.drain_timeout))


def template_notes(spec: LLMDeploymentSpec) -> Iterator[Problem]:
    """Yield overrides that a namespace with the restricted profile would refuse, and those that need care."""
    pod = spec.template.spec if spec.template else None
    if not pod:
        return
    message = "weaker than the restricted profile: a namespace that enforces it refuses the pods"
    contexts = [(f"{FIELD}.spec", pod)]
    contexts += [(f"{FIELD}.spec.{kind}[{i}]", c) for kind, i, c in _containers(pod)]
    for where, part in contexts:
        context = part.get("securityContext")
        for name in _weak_fields(context if isinstance(context, dict) else {}):
            yield Problem(f"{where}.securityContext.{name}", "", message)
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield Problem(f"{FIELD}.spec.{name}", True, message)
    for kind, index, container in _containers(pod):
        if kind == "containers" and container.get("name") == CONTAINER:
            present = (name for name in _SECURITY_FIELDS if container.get(name) is not None)
            yield from (Problem(f"{FIELD}.spec.{kind}[{index}].{name}", "", _SECURITY_FIELDS[name]) for name in present)


def _own_names(kind: str, given: dict[str, str]) -> Iterator[Problem]:
    for name in given:
        if name.startswith(OWN_PREFIX) or (kind == "labels" and name in OWN_LABELS):
            message = "is set by the operator, which finds the pods by it; choose another name"
            yield Problem(f"{FIELD}.metadata.{kind}[{name}]", given[name], message)


def _pod_problems(pod: dict[str, Any], drain_timeout_s: float) -> Iterator[Problem]:
    field = f"{FIELD}.spec"
    for name in MERGED_LISTS:
        if name in pod and not _is_list_of_objects(pod[name]):
            yield Problem(f"{field}.{name}", pod[name], "must be a list of objects, as in a PodSpec")
    if (pod.get("restartPolicy") or "Always") != "Always":
        yield Problem(f"{field}.restartPolicy", pod["restartPolicy"], "engines must always be restarted; remove it")
    grace_s, least_s = pod.get("terminationGracePeriodSeconds"), drain_timeout_s + GRACE_MARGIN_S
    if "terminationGracePeriodSeconds" in pod and not (isinstance(grace_s, int) and grace_s >= least_s):
        message = (
            f"running requests would be cut off: use at least {least_s:g}, which is drainTimeout + {GRACE_MARGIN_S} s"
        )
        yield Problem(f"{field}.terminationGracePeriodSeconds", grace_s, message)
    for index, volume in _objects(pod.get("volumes")):
        if volume.get("name") in OWN_VOLUMES:
            yield Problem(f"{field}.volumes[{index}].name", volume["name"], "is the operator's volume; rename it")
    for kind, index, container in _containers(pod):
        if kind == "containers" and container.get("name") == CONTAINER:
            yield from _engine_problems(container, f"{field}.containers[{index}]")


def _engine_problems(container: dict[str, Any], field: str) -> Iterator[Problem]:
    for name in ("env", "volumeMounts", "ports"):
        if name in container and not _is_list_of_objects(container[name]):
            yield Problem(f"{field}.{name}", container[name], "must be a list of objects, as in a PodSpec")
    for index, mount in _objects(container.get("volumeMounts")):
        if str(mount.get("mountPath", "")).rstrip("/") in OWN_VOLUMES.values():
            message = "the operator mounts settings, token, certificate or model there; choose another path"
            yield Problem(f"{field}.volumeMounts[{index}].mountPath", mount["mountPath"], message)
    for index, port in _objects(container.get("ports")):
        if port.get("name") in OWN_PORTS or port.get("containerPort") in OWN_PORT_NUMBERS:
            message = "the engine's own ports have this name or number; choose another name and number"
            yield Problem(f"{field}.ports[{index}]", port.get("containerPort"), message)
    for name, remedy in _OWN_FIELDS.items():
        if container.get(name) is not None:
            yield Problem(f"{field}.{name}", str(container[name])[:80], remedy)
    lifecycle = container.get("lifecycle")
    if isinstance(lifecycle, dict) and lifecycle.get("preStop") is not None:
        message = "the operator drains the engine there; remove it"
        yield Problem(f"{field}.lifecycle.preStop", "", message)


def _containers(pod: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for kind in ("containers", "initContainers"):
        for index, container in _objects(pod.get(kind)):
            yield kind, index, container


def _weak_fields(context: dict[str, Any]) -> Iterator[str]:
    weak = {"privileged": True, "allowPrivilegeEscalation": True, "runAsNonRoot": False, "runAsUser": 0}
    # `==` alone is not enough: 0 equals False.
    yield from (name for name, value in weak.items() if name in context and context[name] is value)
    if isinstance(capabilities := context.get("capabilities"), dict) and capabilities.get("add"):
        yield "capabilities.add"
    if isinstance(profile := context.get("seccompProfile"), dict) and profile.get("type") == "Unconfined":
        yield "seccompProfile"


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _objects(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(value, list):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, dict))
