"""The types of a plan: neutral values that every backend can carry out and that compare by content."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from pagemill_crds.sections.autoscaling import DEFAULT_OBJECTIVE
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.resource.served import ServedModel


@dataclass(frozen=True)
class Problem:
    """A field that cannot be carried out, has no effect here, or has a consequence that is easily overlooked."""

    field: str
    """Dotted path in the resource, such as `spec.engine.quantization`."""
    value: Any
    message: str
    """The cause and the remedy."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"

    @property
    def as_ignored(self) -> str:
        """The sentence about a field that has no effect: field, value, cause and remedy."""
        return f"{self.field} {self.value!r} has no effect: {self.message}"


@dataclass(frozen=True)
class Probe:
    """An HTTP probe of a process; status 200 is a success."""

    port: int
    path: str
    period_s: float
    failure_threshold: int


@dataclass(frozen=True)
class Process:
    """One process of a replica, as it runs in a pod or on this machine."""

    module: str
    """Python module run with `python -m`, given `--settings FILE`."""
    settings: dict[str, Any]
    """Content of the settings file, JSON."""
    environment: dict[str, str] = field(default_factory=dict)
    environment_from: dict[str, Any] = field(default_factory=dict)
    """Variables whose values come from Secrets and ConfigMaps, as the resource names them."""
    ports: dict[str, int] = field(default_factory=dict)
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    gpus: int = 0
    gpu_product: str | None = None
    drain_timeout_s: float = 60.0
    """Seconds that running requests have after SIGTERM."""


@dataclass(frozen=True)
class Group:
    """Replicas that are alike."""

    name: str
    replicas: int
    process: Process
    pods_per_replica: int = 1
    digest: str = ""
    """Changes exactly when running replicas must be replaced."""
    strategy: str = "Auto"
    max_surge: int | str = 1
    max_unavailable: int | str = 0
    image: str | None = None
    version: str | None = None
    """Version of the engine's image if `image` is None."""
    template: dict[str, Any] = field(default_factory=dict)
    """Overrides of the pod template."""

    @property
    def surge(self) -> int:
        """Replicas allowed beyond `replicas` during a replacement; a percentage is rounded up."""
        return _share(self.max_surge, self.replicas, math.ceil)

    @property
    def unavailable(self) -> int:
        """Replicas that may be missing during a replacement; a percentage is rounded down.

        At least 1 if nothing else would allow any progress.
        """
        unavailable = _share(self.max_unavailable, self.replicas, math.floor)
        return unavailable if unavailable or self.surge else 1


@dataclass(frozen=True)
class ModelCachePlan:
    """The cache that keeps the model beyond a pod's life: a claim, a folder of each node, or an image."""

    claim_name: str | None = None
    size: int | str | None = None
    storage_class_name: str | None = None
    access_mode: str = "ReadWriteOnce"
    host_path: str | None = None
    """Folder on each node; an init container of the first pod there fetches the model."""
    size_limit_bytes: int | None = None
    """Limit of all models in `host_path`."""
    image_volume: bool = False
    """Whether the source is an image that the kubelet pulls and mounts."""

    @property
    def has_claim(self) -> bool:
        """Whether the cache is a claim, which a Job fills once before engines start."""
        return self.host_path is None and not self.image_volume


@dataclass(frozen=True)
class SecretKey:
    name: str
    key: str


@dataclass(frozen=True)
class Plan:
    """Everything that one LLMDeployment needs."""

    namespace: str
    name: str
    generation: int
    served: ServedModel
    """What gateways read of the spec."""
    source: str
    groups: tuple[Group, ...]
    autoscaling: ScalingSettings | None = None
    """None if the number of replicas is the spec's."""
    spec_replicas: int = 1
    """The number of replicas to start with, and to keep without autoscaling."""
    cache: ModelCachePlan | None = None
    replica_price: float | None = None
    """Price of one replica for one hour; for metrics only."""
    objective: float = DEFAULT_OBJECTIVE
    """Percentage of requests that must be answered; for metrics only."""
    credentials: SecretKey | None = None
    """Used by the loader only: engines never see it."""
    problems: tuple[Problem, ...] = ()
    """Fields that cannot be carried out; a plan with any must not be carried out."""
    ignored: tuple[Problem, ...] = ()
    """Fields that have no effect here; the rest of the plan is carried out."""
    adapters: tuple[WantedAdapter, ...] = ()
    """LoRA adapters that its engines are asked to serve; they change without a new replica."""
    notes: tuple[Problem, ...] = ()
    """Fields that have an effect and a consequence that is easily overlooked."""

    @property
    def draft_source(self) -> str | None:
        """What drafts, if it has a source of its own."""
        speculative: dict[str, str] = self.groups[0].process.settings["engine"].get("speculative") or {}
        return speculative.get("source")

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases."""
        return self.served.names

    @property
    def serves_adapters(self) -> bool:
        """Whether engines have places for adapters."""
        return bool(self.groups[0].process.settings["engine"].get("enable_lora"))

    @property
    def weight(self) -> int | None:
        return self.served.weight

    @property
    def waits_for_job(self) -> bool:
        """Whether engines start only once a Job has filled the model's claim."""
        return self.cache is not None and self.cache.has_claim

    @property
    def model_name(self) -> str:
        return self.names[0]

    @property
    def replicas(self) -> int:
        """Number of replicas that serve."""
        return sum(group.replicas for group in self.groups)

    @property
    def max_replicas(self) -> int:
        """Most replicas that serve when the autoscaler has added all that it may."""
        scaling = self.autoscaling
        return scaling.max_replicas if scaling is not None and scaling.mode == "Active" else self.replicas

    @property
    def pods_per_replica(self) -> int:
        """Number of pods that compute the model together; more than one are a group."""
        return self.groups[0].pods_per_replica

    @property
    def gpus_per_replica(self) -> int:
        return sum(group.process.gpus * group.pods_per_replica for group in self.groups)

    @property
    def standby(self) -> int:
        """Number of additional replicas that are loaded and asleep."""
        return self.autoscaling.standby(self.replicas) if self.autoscaling is not None else 0

    @property
    def all_replicas(self) -> int:
        """Number of replicas that exist, awake or asleep."""
        return self.replicas + self.standby

    def with_replicas(self, replicas: int) -> Plan:
        """Return the plan with so many replicas of its one group."""
        if replicas == self.replicas:
            return self
        return replace(self, groups=(replace(self.groups[0], replicas=replicas), *self.groups[1:]))


def _share(value: int | str, replicas: int, rounding: Any) -> int:
    if isinstance(value, int):
        return value
    return int(rounding(int(value.removesuffix("%")) * replicas / 100))
