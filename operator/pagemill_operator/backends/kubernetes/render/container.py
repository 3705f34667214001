"""Renders the engine's container: image, settings, probes, drain, resources."""

from __future__ import annotations

import re
from typing import Any

from pagemill_operator.backends.kubernetes.render.config import engine_ports, settings_path
from pagemill_operator.backends.kubernetes.render.model import keeps_kernels, model_volume
from pagemill_operator.backends.kubernetes.render.security import container_security
from pagemill_operator.backends.kubernetes.snapshot import RenderContext
from pagemill_operator.plan.pod_template import CONTAINER, KERNELS_PATH, KERNELS_VOLUME, OWN_VOLUMES
from pagemill_operator.plan.types import Group, Plan, Probe, Process

GPU = "nvidia.com/gpu"
PROBE_GRACE_S = 30
"""Seconds that a container has to end after a failed liveness probe: it hangs, so it does not get its drain time."""


def engine_container(plan: Plan, context: RenderContext, *, serves: bool = True) -> dict[str, Any]:
    """Return the container; one that does not serve only computes for its group: it has no ports, and ends if it
    fails."""
    group = plan.groups[0]
    process = group.process
    ports = engine_ports(plan, context) if serves else {}
    return {
        "name": CONTAINER,
        "image": engine_image(group, context),
        "imagePullPolicy": context.image_pull_policy,
        "args": ["--settings", settings_path()],
        "env": environment(process),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        **(_probes(process, "HTTPS" if context.engine_tls_secret else "HTTP") if serves else {}),
        "lifecycle": {"preStop": {"exec": {"command": _drain_command()}}},
        "resources": _resources(process),
        "securityContext": container_security(),
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": _mounts(plan, context),
    }


def engine_image(group: Group, context: RenderContext) -> str:
    """Return the resource's own image, or the installation's image with the version that the resource pins."""
    if group.image:
        return group.image
    installed = context.engine_image if group.process.gpus else context.cpu_engine_image or context.engine_image
    if not group.version:
        return installed
    repository = re.sub(r"(:[^:/@]+)?(@[^@]+)?$", "", installed)
    return f"{repository}:{group.version}"


def environment(process: Process) -> list[dict[str, Any]]:
    """Return the container's environment variables.

    `$` is doubled, because Kubernetes expands it: a value means the same here as for a local process.
    """
    variables: dict[str, dict[str, Any]] = {"HOME": {"value": "/tmp"}}
    variables |= {name: {"value": value.replace("$", "$$")} for name, value in process.environment.items()}
    variables |= {name: {"valueFrom": source} for name, source in process.environment_from.items()}
    return [{"name": name, **value} for name, value in variables.items()]


def _drain_command() -> list[str]:
    return ["python", "-m", "pagemill_engine.drain", "--settings", settings_path()]


def _probes(process: Process, scheme: str) -> dict[str, Any]:
    probes = {
        "startupProbe": _probe(process.startup, scheme, PROBE_GRACE_S),
        "readinessProbe": _probe(process.readiness, scheme, None),
        "livenessProbe": _probe(process.liveness, scheme, PROBE_GRACE_S),
    }
    return {name: probe for name, probe in probes.items() if probe}


def _probe(probe: Probe | None, scheme: str, grace_s: int | None) -> dict[str, Any] | None:
    if probe is None:
        return None
    rendered: dict[str, Any] = {
        "httpGet": {"path": probe.path, "port": "control", "scheme": scheme},
        "periodSeconds": max(1, round(probe.period_s)),
        "timeoutSeconds": 5,
        "failureThreshold": probe.failure_threshold,
    }
    return rendered if grace_s is None else rendered | {"terminationGracePeriodSeconds": grace_s}


def _resources(process: Process) -> dict[str, Any]:
    """Return the resources of the container; requests equal limits, so that a pod gets what it may use."""
    amounts: dict[str, str] = {}
    if process.cpu_cores:
        amounts["cpu"] = f"{round(process.cpu_cores * 1000)}m"
    if process.memory_bytes:
        amounts["memory"] = str(process.memory_bytes)
    if process.gpus:
        amounts[GPU] = str(process.gpus)
    return {"requests": dict(amounts), "limits": amounts} if amounts else {}


def _mounts(plan: Plan, context: RenderContext) -> list[dict[str, Any]]:
    is_absent = {
        "adapters": not plan.serves_adapters,
        "model": model_volume(plan, writable=False) is None,
        "engine-tls": not context.engine_tls_secret,
    }
    volumes = [name for name in OWN_VOLUMES if not is_absent.get(name)]
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": OWN_VOLUMES[name], "readOnly": True} for name in volumes
    ]
    if keeps_kernels(plan):
        mounts.append({"name": "model", "mountPath": KERNELS_PATH, "subPath": KERNELS_VOLUME})
    return [*mounts, {"name": "tmp", "mountPath": "/tmp"}]
