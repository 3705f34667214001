"""The values that one reconcile of an `LLMDeployment` reads and passes to the pure functions around it.

`pagemill_operator.controller` fills them; `render` makes manifests of them, `observe` and `status` explain them. No
cluster library is imported here.

    render_children(plan: Plan, owner: Owner, context: RenderContext) -> list[Manifest]
        Every wanted child. With `model.cache` the engine Deployment is absent until `context.loader_done`; a
        Deployment, Service or Secret that is not rendered is never deleted.
    loader_name(plan: Plan) -> str | None
        Name of the loader Job of the plan's source; None without `model.cache`.
    observe(snapshot: Snapshot, plan: Plan | None) -> Observation
        `plan` is None if the spec cannot be read (see `snapshot.invalid`).
    status_body(snapshot: Snapshot, observation: Observation, url: str, now: str) -> dict[str, Any]
        The whole wanted `status`; equal to `snapshot.owner["status"]` while nothing has changed. `now`: RFC 3339.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill_crds.status import AdapterSummary
from pagemill_operator.config import EngineIds
from pagemill_operator.plan.types import Problem
from pagemill_protocol.report.state import EngineLoad

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

FIELD_MANAGER = "pagemill-operator"
DIGEST_ANNOTATION = "pagemill.dev/digest"
"""On each child: the digest of the manifest that it was applied from. The backend sets it, not `render_children`."""
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
    """The inputs of manifests beyond the plan: the installation's settings and the cluster's state."""

    namespace: str
    """The release's namespace, where the gateway runs."""
    engine_image: str
    """The engine image for resources that name none."""
    cpu_engine_image: str = ""
    """The same for engines without GPUs; empty: `engine_image`."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    gateway_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of gateway pods in `namespace`."""
    operator_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the operator's pods in `namespace`; the operator puts engines to sleep and wakes them."""
    prometheus_namespace_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of Prometheus's namespace. If the pod selector is empty too, no monitoring pod is admitted."""
    prometheus_pod_selector: Mapping[str, str] = field(default_factory=dict)
    engine_ids: EngineIds = field(default_factory=lambda: {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532})
    """User and groups of the pods of engines and loaders."""
    engine_extra_egress: tuple[Mapping[str, Any], ...] = ()
    """Additional egress rules of the engines' NetworkPolicies."""
    engine_tls_secret: str = ""
    """Secret beside the resource with `tls.crt`, `tls.key` and `ca.crt` of the engines; empty: engines use HTTP."""
    engine_tls_name: str = ""
    """The name in the engines' certificates."""
    tokens: tuple[str, ...] = ()
    """Tokens that the engines accept, newest first."""
    has_pod_monitors: bool = False
    """Whether the cluster has the kind PodMonitor of `monitoring.coreos.com/v1`."""
    prefers_ipv6: bool = False
    """Whether IPv6 is the cluster's first or only family of addresses, that of pods' and Services' own ones."""
    in_place: str = ""
    """Why the rollout replaces replicas in place; empty: it adds one first."""
    loader_done: bool = False
    """Whether the loader Job of this plan's source has succeeded; always False without `model.cache`."""


@dataclass(frozen=True)
class ApplyError:
    """A child that could not be applied, for example because of a quota or an invalid pod template override."""

    kind: str
    name: str
    status_code: int
    reason: str
    """The API's reason, such as `Forbidden` or `Invalid`."""
    message: str
    is_transient: bool = False
    """Whether the error may pass by itself; it is reported only if it lasts."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that is known of one `LLMDeployment` at one instant. Objects are raw JSON without managedFields."""

    owner: Manifest
    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    """(kind, name) -> object, for all kinds but Pod: Deployment, Service, ConfigMap, Secret, PersistentVolumeClaim,
    Job, PodDisruptionBudget, NetworkPolicy, PodMonitor. Secrets come without data.
    """
    pods: tuple[Manifest, ...] = ()
    """Engine and loader pods, oldest first."""
    num_gateways: int = 0
    """Number of gateway pods that are not being deleted."""
    num_gateways_ready: int = 0
    conflict: Problem | None = None
    """Set if an older deployment serves one of this deployment's model names."""
    invalid: tuple[Problem, ...] = ()
    """Problems of a spec that cannot be read: the CRD's schema accepts it, but the models refuse it."""
    apply_errors: tuple[ApplyError, ...] = ()
    """Errors of the last attempt to apply the children; empty if all were applied."""
    load: EngineLoad | None = None
    """The measured load; None while no gateway reports the deployment."""
    asleep: frozenset[str] = frozenset()
    """Uids of the pods whose engines sleep, as gateways report."""
    progress: str = ""
    """Progress of a running loader from its log; empty if unknown."""
    autoscalers: tuple[str, ...] = ()
    """Names of the HorizontalPodAutoscalers that scale the deployment."""
    adapters: tuple[AdapterSummary, ...] = ()
    """The adapters that are claimed, and the replicas that serve them."""

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
        """Return the pods of `engine` or `loader`, oldest first."""
        return tuple(pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == component)
