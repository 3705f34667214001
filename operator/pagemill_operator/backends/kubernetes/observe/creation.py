"""Finds why the API server refused a pod or a child, from its message."""

from __future__ import annotations

import re

from pagemill_operator.backends.kubernetes.observe.cause import Cause, quote, without_object_name
from pagemill_operator.backends.kubernetes.snapshot import ApplyError
from pagemill_operator.status.observation import Fault

GROUPS_VERSION = "0.7"
"""The version of the controller of LeaderWorkerSets that the operator is tested with."""
_LACKING_FIELD = r"(?<= )\.spec(?!\.leaderWorkerTemplate\.(leader|worker)Template)\.[\w.]+(?=: field not declared)"
"""A field of a LeaderWorkerSet that its definition lacks; fields of pod templates may be those of spec.template."""
_TEMPLATED = ("Deployment", "LeaderWorkerSet", "Job")
_MALFORMED = (422, 500)
"""Status codes of malformed fields: server-side apply answers 500 to a wrong type. Server faults never come here."""
_DENIED = r"denied (the )?request"
"""Pattern of the messages of admission webhooks and policies, whose status codes differ."""
_NOT_PERMITTED = r"cannot \w+ resource"
_NOT_RESIZABLE = r"be resized|support resize|can ?not be less than|immutable after creation"
_REFUSALS = (
    (
        _DENIED,
        "AdmissionDenied",
        "a webhook or policy of this cluster does not allow it: follow its message (change pods in spec.template), or "
        "ask its owner for an exception",
    ),
    (
        r"exceeded quota",
        "QuotaExceeded",
        "raise the namespace's ResourceQuota, or ask for less in spec.resources, spec.replicas or spec.model.cache",
    ),
    (
        r"failed quota",
        "ResourcesRequired",
        "the namespace's ResourceQuota requires amounts of every pod: set spec.resources.cpu and spec.resources.memory",
    ),
    (
        r"violates PodSecurity",
        "PodSecurityViolation",
        "remove what spec.template adds, or use a namespace with a weaker profile",
    ),
    (
        r"(maximum|minimum) .* usage per|per (Container|Pod) is",
        "LimitRangeViolation",
        "change spec.resources to be within the bounds of the namespace's LimitRange",
    ),
    (r"no PriorityClass", "PriorityClassNotFound", "correct priorityClassName in spec.template.spec"),
    (
        r"error looking up service account|serviceaccount .* not found",
        "ServiceAccountNotFound",
        "create it, or correct serviceAccountName in spec.template.spec",
    ),
    (r"RuntimeClass", "RuntimeClassNotFound", "correct runtimeClassName in spec.template.spec"),
    (r"is being terminated", "NamespaceTerminating", "the namespace is being deleted: apply to another one"),
)
"""A pattern of a refusal's message, the reason that it means, and the remedy."""


def not_created(message: str) -> Cause:
    """Return why a pod was not created, from a ReplicaFailure condition."""
    words = without_object_name(message)
    for pattern, reason, remedy in _REFUSALS:
        if re.search(pattern, message, re.IGNORECASE):
            return Cause(reason, f"pods are refused ({quote(words)}): {remedy}")
    return Cause("PodsNotCreated", f"pods are refused ({quote(words)}): see kubectl describe replicaset")


def not_applied(error: ApplyError) -> Fault:
    """Return the fault of a child that could not be applied."""
    words = quote(without_object_name(error.message))
    what = f"the {error.kind} {error.name} is refused ({words})"
    if error.is_transient:
        return _not_answered(error)
    if error.kind == "LeaderWorkerSet" and error.status_code == 404:
        remedy = (
            f"install its controller (https://lws.sigs.k8s.io/docs/installation/, tested with {GROUPS_VERSION}), or "
            "set spec.engine.podsPerReplica to 1"
        )
        message = f"replicas of several pods need LeaderWorkerSets, which this cluster lacks: {remedy}"
        return Fault("Scheduled", "LeaderWorkerSetMissing", message)
    if error.kind == "LeaderWorkerSet" and (lacking := re.search(_LACKING_FIELD, error.message)):
        remedy = f"install version {GROUPS_VERSION} of its controller with its definitions"
        message = f"the LeaderWorkerSets of this cluster lack the field {lacking[0]}: {remedy}"
        return Fault("Scheduled", "LeaderWorkerSetVersion", message)
    if error.reason == "AlreadyExists":
        return Fault("Scheduled", "NameTaken", quote(error.message))
    if error.kind == "PersistentVolumeClaim" and re.search(_NOT_RESIZABLE, error.message, re.IGNORECASE):
        remedy = (
            "volumes grow only where their StorageClass sets allowVolumeExpansion, and never shrink; set "
            "spec.model.cache.size back, or create a new LLMDeployment"
        )
        return Fault("Scheduled", "VolumeNotResizable", f"{what}: {remedy}")
    is_denied = re.search(_DENIED, error.message, re.IGNORECASE) is not None
    if error.status_code in _MALFORMED and error.kind in _TEMPLATED and not is_denied:
        remedy = "correct spec.template, which is merged into the pod template"
        return Fault("Planned", "InvalidTemplate", f"{what}: {remedy}")
    for pattern, reason, remedy in _REFUSALS:
        if re.search(pattern, error.message, re.IGNORECASE):
            return Fault("Scheduled", reason, f"{what}: {remedy}")
    if re.search(_NOT_PERMITTED, error.message):
        remedy = f"the operator may not write {error.kind} objects here; install the chart's roles for this namespace"
        return Fault("Scheduled", "Forbidden", f"{what}: {remedy}")
    if error.status_code == 403:
        remedy = "an admission plugin of this cluster does not allow it: follow its message"
        return Fault("Scheduled", "AdmissionDenied", f"{what}: {remedy}")
    return Fault("Scheduled", "ChildRefused", f"{what}; the operator tries again, see its log")


def _not_answered(error: ApplyError) -> Fault:
    """Return the fault of an API server that has failed several times in a row; the operator keeps trying."""
    words = f"the {error.kind} {error.name} cannot be written ({quote(without_object_name(error.message))})"
    if "webhook" in error.message:
        remedy = "repair the admission webhook that it names, or exclude this namespace from it"
        return Fault("Scheduled", "WebhookFailed", f"{words}: {remedy}")
    return Fault("Scheduled", "ApiServerRefuses", f"{words}: the API server fails; see its log")
