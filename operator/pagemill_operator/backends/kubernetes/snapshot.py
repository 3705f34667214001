"""What one reconcile of an `LLMDeployment` reads, as plain values, and what it hands to the pure functions around it.

The contract between the running operator (`pagemill_operator.controller`, which fills these) and its decisions
(`render` makes manifests, `observe` and `status` explain). No cluster library is imported here.

    render_children(plan: Plan, owner: Owner, context: RenderContext) -> list[Manifest]
        Every child that is wanted now. With `model.cache` the engine Deployment is absent until
        `context.loader_done`; the controller never deletes a Deployment, Service or Secret that is not rendered.
    loader_name(plan: Plan) -> str | None
        Name of the loader Job of the plan's source; None without `model.cache`.
    observe(snapshot: Snapshot, plan: Plan | None) -> Observation
        `plan` is None where the spec cannot be read (`snapshot.invalid` says why).
    status_body(snapshot: Snapshot, observation: Observation, url: str, now: str) -> dict[str, Any]
        The whole wanted `status`; equal to `snapshot.owner["status"]` while nothing has changed. `now`: RFC 3339.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill_operator.load.store import MeasuredLoad
from pagemill_operator.plan.types import Problem

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

FIELD_MANAGER = "pagemill-operator"
DIGEST_ANNOTATION = "pagemill.dev/digest"
"""On each child: digest of the manifest it was applied from. Set by the controller, not by `render_children`."""
OWNER_LABEL = "pagemill.dev/deployment"
COMPONENT_LABEL = "app.kubernetes.io/component"
NAME_LABEL = "app.kubernetes.io/name"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"


@dataclass(frozen=True)
class Owner:
    """The `LLMDeployment` that owns the children."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class RenderContext:
    """What the manifests need beyond the plan: the installation's settings and what is known of the cluster."""

    namespace: str
    """The release's namespace, where the gateway runs."""
    engine_image: str
    """Used where the resource names no image of its own."""
    cpu_engine_image: str = ""
    """The same for engines without GPUs; empty: `engine_image`."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    gateway_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of gateway pods in `namespace`."""
    operator_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the operator's own pods there, which put engines to sleep and wake them."""
    prometheus_namespace_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the namespace that Prometheus runs in; empty with an empty pod selector: no other pod is let in."""
    prometheus_pod_selector: Mapping[str, str] = field(default_factory=dict)
    engine_extra_egress: tuple[Mapping[str, Any], ...] = ()
    """Further rules of the engines' NetworkPolicies."""
    engine_tls_secret: str = ""
    """Secret beside the resource with `tls.crt`, `tls.key` and `ca.crt` of engines; empty: they speak HTTP."""
    engine_tls_name: str = ""
    """The name in their certificates."""
    tokens: tuple[str, ...] = ()
    """Tokens that the engines accept, newest first."""
    has_pod_monitors: bool = False
    """The cluster knows `monitoring.coreos.com/v1` PodMonitor."""
    loader_done: bool = False
    """The loader Job of this plan's source has succeeded (always False without `model.cache`)."""


@dataclass(frozen=True)
class ApplyError:
    """The API server refused a child, for example because of a quota or an invalid override of the pod template."""

    kind: str
    name: str
    status_code: int
    reason: str
    """The API's word, such as `Forbidden` or `Invalid`."""
    message: str
    is_passing: bool = False
    """The cause is the server or the moment; reported only where it lasts."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that is known of one `LLMDeployment` at one instant. Objects are raw JSON without managedFields."""

    owner: Manifest
    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """(kind, name) -> object, all kinds but Pod: Deployment, Service, ConfigMap, Secret, PersistentVolumeClaim, Job,
    PodDisruptionBudget, NetworkPolicy, PodMonitor. Secrets come without data."""
    pods: tuple[Manifest, ...] = ()
    """Engine and loader pods, oldest first."""
    num_gateways: int = 0
    """Gateway pods that are not ending."""
    num_gateways_ready: int = 0
    conflict: Problem | None = None
    """An older deployment serves one of its names."""
    invalid: tuple[Problem, ...] = ()
    """The spec cannot be read: the API server's schema lets through what the models refuse."""
    apply_errors: tuple[ApplyError, ...] = ()
    """What the last try to apply the children met; empty when all stand."""
    load: MeasuredLoad | None = None
    """None while no gateway reports the deployment."""
    asleep: frozenset[str] = frozenset()
    """Uids of the pods whose engines sleep, as gateways report."""
    progress: str = ""
    """How far a loader is that runs, where its log says so."""

    @property
    def namespace(self) -> str:
        return str(self.owner["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def generation(self) -> int:
        return int(self.owner["metadata"].get("generation", 0))

    def child(self, kind: str, name: str) -> Manifest | None:
        return self.children.get((kind, name))

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        return (child for (child_kind, _), child in self.children.items() if child_kind == kind)

    def component_pods(self, component: str) -> tuple[Manifest, ...]:
        """Pods of `engine` or `loader`, oldest first."""
        return tuple(pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == component)
