"""Finds why a container does not run from its status: what it waits for, and how it last ended.

The engine and the loader write a termination message, JSON with a reason and a remedy; if there is one, it is the
cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pagemill_operator.backends.kubernetes.observe.cause import Cause, quote

_PULL_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "ErrImageNeverPull",
    "InvalidImageName",
)
_START_REASONS = ("CreateContainerError", "RunContainerError", "PreCreateHookError", "PostStartHookError")
WAITING_REASONS = (
    "ImagePullFailed",
    "ImageNotPresent",
    "InvalidImageName",
    "MissingSecret",
    "MissingConfigMap",
    "NodeLost",
)
"""Reasons of pods whose containers have not ended: they are over as soon as no pod shows them."""
_GENERIC = ("EngineDied", "EngineFailed", "ServerFailed", "OutOfMemory")
"""Reasons of termination messages that name the effect but not the cause."""
_BY_KUBELET = (0, 137, 143)
"""Exit codes of containers that the kubelet ends: 0 or 143 after SIGTERM, 137 after SIGKILL."""
_CANNOT_START = (126, 127, 128)
_MEMORY = "memory is spec.resources.memory, a GPU with its own spec.resources.gpuProduct"
_REMEDIES = {
    "DeviceUnavailable": "Check that the node's driver, container toolkit and device plugin are installed and recent, "
    "and that spec.engine.image is one for GPUs.",
    "GraphsTooLarge": "Change them in spec.engine.",
    "InvalidChatTemplate": "Correct spec.model.chatTemplate.",
    "UnknownParser": "Correct spec.model.toolCallParser or spec.model.reasoningParser.",
    "KVCacheTooLarge": f"It is a field of spec.engine; {_MEMORY}.",
    "KVCacheTooSmall": "It is a field of spec.engine.",
    "MaxModelLenTooLarge": "Both are fields of spec.engine.",
    "ModelNotFound": "Correct spec.model.source.",
    "ModelTooLarge": f"The model is spec.model.source; {_MEMORY}.",
    "ModelUnreadable": "Give a complete model in spec.model.source.",
    "RankMismatch": "Pods of a group need one image and one model: set spec.engine.image to a tag that never changes, "
    "or its digest, and spec.model.source to a revision that all nodes have.",
    "RendezvousFailed": "Pods of a group find the first one by the headless Service of their LeaderWorkerSet: check "
    "the cluster's DNS, and that no other NetworkPolicy (kubectl get networkpolicy) keeps them from each other.",
    "SettingsInvalid": "The engine and the operator differ in version: check spec.engine.image and version.",
    "SettingsUnsupported": "It is a field of spec.engine.",
    "SourceUnavailable": "Check spec.model.source; a gated model needs spec.model.credentialsSecretRef and cache.",
    "StepTooLarge": f"They are fields of spec.engine; {_MEMORY}.",
    "Unauthorized": "Correct the Secret that spec.model.credentialsSecretRef names.",
    "UnsupportedArchitecture": "Choose a supported model in spec.model.source.",
    "UnsupportedQuantization": "Choose other weights in spec.model.source.",
}
"""Remedy by reason, in terms of the resource's fields; the engine's own message names only its own settings."""
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
"""The pattern of a condition's reason; a message with another reason was written by another program."""
_LOGS = "read its log (kubectl logs --previous)"


def waiting_cause(status: dict[str, Any], mounted_images: Sequence[str] = ()) -> Cause | None:
    """Return why a container waits, or None if it only needs time.

    `mounted_images` are the image volumes of the pod: its containers wait for them as for their own images.
    """
    waiting = status.get("state", {}).get("waiting")
    if not waiting:
        return None
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    image = status.get("image", "")
    if reason in _PULL_REASONS:
        mounted = next((each for each in mounted_images if each in message), None)
        return _pull_cause(reason, message, image) if mounted is None else _mount_cause(message, mounted)
    if reason == "CreateContainerConfigError":
        return _config_cause(message)
    if reason in _START_REASONS:
        return _cannot_start(message or reason)
    return None


def ended_cause(status: dict[str, Any], *, is_probed: bool = True) -> Cause | None:
    """Return how the container last ended, or None if it never did. `is_probed`: of `termination_cause`."""
    ended = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    return termination_cause(ended, is_probed=is_probed) if ended else None


def ended_beside_cause(status: dict[str, Any], *, may_complete: bool) -> Cause | None:
    """Return how a container that runs beside the main one last ended, or None if it never did or ended well.

    `may_complete`: whether it may end before the main one does.
    """
    ended = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    if ended is None or ended.get("exitCode") != 0:
        return ended_cause(status)
    if may_complete:
        return None
    remedy = "make it an init container of spec.template, or let it run as long as the pod"
    message = f"it has ended, and a pod is ready only while all of its containers run: {remedy}"
    return Cause("ContainerCompleted", message)


def termination_cause(ended: dict[str, Any], *, is_probed: bool = True) -> Cause:
    """Return why a container ended. `is_probed`: whether it has probes, for which the kubelet may end it."""
    reported = _reported(str(ended.get("message", "")))
    code = int(ended.get("exitCode", 0))
    if ended.get("reason") == "OOMKilled" and (reported is None or reported.reason in _GENERIC):
        return Cause(
            "OOMKilled",
            "the container exceeded its memory limit and was killed: raise spec.resources.memory, lower "
            "spec.engine.kvCacheMemory or maxNumSeqs, or choose a smaller model",
        )
    if reported and reported.reason not in _GENERIC:
        return reported
    if reported:
        return Cause("CrashLoop", f"the engine keeps crashing: {reported.message}; {_LOGS}")
    if code in _CANNOT_START or ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return _cannot_start(str(ended.get("message", "")))
    if code in _BY_KUBELET and not is_probed:
        return Cause(
            "ContainerKilled",
            f"the container was ended from outside (exit code {code}), and not by its memory limit: see kubectl "
            "describe pod and the log of its node, whose memory may have run out, and check that nothing in "
            "spec.template ends it",
        )
    if code in _BY_KUBELET:
        return Cause(
            "ProbeFailing",
            f"the container was ended from outside (exit code {code}), as the kubelet does when its startup or "
            "liveness probe fails: check that spec.engine.image is an engine of this version and that spec.template "
            f"does not change its probes, see kubectl describe pod, and {_LOGS}",
        )
    detail = f": {quote(str(ended['message']))}" if ended.get("message") else ""
    return Cause("CrashLoop", f"the container keeps ending with exit code {code}{detail}; {_LOGS}")


def unready_cause() -> Cause:
    """Return the cause of a container that was ready before, has not ended, and is not ready now."""
    return Cause(
        "ProbeFailing",
        "the readiness probe fails although the replica was ready before: see kubectl describe pod, and read its log",
    )


def lost_node_cause(node: str) -> Cause:
    return Cause(
        "NodeLost",
        f"the node {node} does not answer any more: see kubectl describe node; the cluster replaces the pod after a "
        "while (5 minutes by default), or at once when the node is deleted",
    )


def _reported(message: str) -> Cause | None:
    """Return the cause in a termination message of an engine or a loader; None for any other message."""
    try:
        content = json.loads(message)
    except ValueError:
        return None
    reason = content.get("reason") if isinstance(content, dict) else None
    if not isinstance(reason, str) or not _REASON.fullmatch(reason):
        return None
    text = str(content.get("message", "")).removeprefix(f"{reason}: ")
    remedy = _REMEDIES.get(reason)
    return Cause(reason, f"{text.rstrip('. ')}. {remedy}" if remedy else text)


def _pull_cause(reason: str, message: str, image: str) -> Cause:
    if reason == "InvalidImageName":
        return Cause("InvalidImageName", f"{quote(image)} is not the name of an image: correct spec.engine.image")
    if reason == "ErrImageNeverPull":
        remedy = "load it there, or allow pulling with the chart's pull policy"
        return Cause("ImageNotPresent", f"the node does not have the image {quote(image)}: {remedy}")
    remedy = (
        "check spec.engine.image and its tag, that the nodes reach the registry, and for a private one "
        "imagePullSecrets in spec.template.spec"
    )
    return Cause("ImagePullFailed", f"the image {quote(image)} cannot be pulled{_pull_detail(message)}: {remedy}")


def _mount_cause(message: str, image: str) -> Cause:
    remedy = (
        "check spec.model.source and its tag, that the nodes reach the registry, and for a private one "
        "spec.model.credentialsSecretRef"
    )
    what = f"the model's image {quote(image)} cannot be pulled{_pull_detail(message)}"
    return Cause("ImagePullFailed", f"{what}: {remedy}")


def _pull_detail(message: str) -> str:
    """Return the reason of a failed pull, or "" if unknown: while backing off, the kubelet may repeat the pull's
    message.
    """
    cause = message.split("ErrImagePull: ")[-1]
    return "" if cause.startswith("Back-off") else f" ({quote(cause)})"


def _config_cause(message: str) -> Cause:
    lower = message.lower()
    remedy = "create it, or correct spec.engine.env or spec.model.credentialsSecretRef"
    if "secret" in lower:
        return Cause("MissingSecret", f"{quote(message)}: {remedy}")
    if "configmap" in lower:
        return Cause("MissingConfigMap", f"{quote(message)}: create it, or correct spec.engine.env")
    return _cannot_start(message)


def _cannot_start(message: str) -> Cause:
    remedy = "check that spec.engine.image is an engine, and what spec.template changes in its container"
    return Cause("ContainerCannotStart", f"the container cannot be started ({quote(message)}): {remedy}")
