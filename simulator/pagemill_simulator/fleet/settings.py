"""The settings of a simulated fleet: its engines, starts, failures and limits.

Traffic is a `workloads.request.Workload`, scaling a `scaling.policy.FleetScaler`; both are passed beside these
settings, so that one fleet can be simulated with several of them.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_gateway.config import BatchesConfig
from pagemill_protocol.resource.served import QueueLimits
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.registry import check_policy
from pagemill_simulator.adapters import AdapterSettings
from pagemill_simulator.scaling.policy import ReplicaBounds

MAX_REPLICAS = 10_000


class FleetSettingsError(ValueError):
    """Invalid settings; the message names the field, its value and the remedy."""


class PodStart(NamedTuple):
    """Seconds of the phases of one pod's start."""

    schedule_s: float
    pull_s: float
    load_s: float
    warm_s: float

    @property
    def restart_s(self) -> float:
        """Seconds of a restart of the container: node and image are there."""
        return self.load_s + self.warm_s

    @property
    def reported(self) -> dict[str, float]:
        """Seconds of the phases that the engine itself reports."""
        return {"load": round(self.load_s, 3), "warm": round(self.warm_s, 3)}


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of the phases of a start."""

    schedule_s: float = 1.0
    """Seconds until the pod is scheduled; it costs nothing before."""
    pull_s: float = 4.0
    """Seconds to pull the image and start the container."""
    load_s: float = 30.0
    """Seconds to load the weights."""
    warm_s: float = 5.0
    """Seconds of calibration and the first token."""
    spread: float = 0.1
    """Standard deviation of a phase's logarithm: 0.1 puts two of three within a tenth of the median."""

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.pull_s + self.load_s + self.warm_s

    def draw(self, seed: int, pod: int, start: int = 0) -> PodStart:
        """Draw the `start`-th start of the `pod`-th pod, which is the same whenever it is and whatever else is
        drawn.
        """
        rng = random.Random(f"{seed} start {start} of pod {pod}")
        medians = (self.schedule_s, self.pull_s, self.load_s, self.warm_s)
        return PodStart(*(median_s * math.exp(rng.gauss(0.0, self.spread)) for median_s in medians))


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    """Settings of every pod. `step_time` gives its step times, `num_kv_blocks` its KV cache."""
    slowness: tuple[float, ...] = (1.0,)
    """Factors of `step_time` if replicas differ: for the first replica, the second, and so on, repeated."""
    adapters: AdapterSettings | None = None
    """The adapters of every pod of an exact fleet; None: pods serve none."""
    bounds: ReplicaBounds
    """A policy's decision is clamped to these bounds."""
    start_replicas: int | None = None
    """Replicas that are ready when traffic begins; None: as few as the bounds allow."""
    routing_policy: str = "Cost"
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    """Used in reports; a scaling policy has its own."""
    cold_start: ColdStart = ColdStart()
    drain_timeout_s: float = 60.0
    """Seconds that a removed pod has for its requests; the rest continues elsewhere."""
    crash_mean_s: float = 0.0
    """Mean seconds from a pod's readiness to its crash, exponentially distributed; 0: no pod crashes."""
    queue: QueueLimits = RoutingConfig().queue
    """Limits of the gateway's queue."""
    batches: BatchesConfig = BatchesConfig()
    """When batch lines are started, and how many run at once."""
    max_attempts: int = RoutingConfig().max_attempts
    """How many pods may fail one request."""
    seed: int = 0
    """Seed of starts, crashes and the gateway's draws; traffic has its own."""

    @property
    def first_replicas(self) -> int:
        return self.bounds.min_replicas if self.start_replicas is None else self.start_replicas

    def engine_of(self, slowness: float) -> EngineConfig:
        """Return the engine settings of replicas whose step times are multiplied by `slowness`."""
        step_time = self.engine.step_time
        if slowness == 1.0 or step_time is None:
            return self.engine
        slower = msgspec.structs.replace(
            step_time,
            knot_ms=[slowness * each for each in step_time.knot_ms],
            decode_context_ms=slowness * step_time.decode_context_ms,
            chunk_context_ms=slowness * step_time.chunk_context_ms,
        )
        return msgspec.structs.replace(self.engine, step_time=slower)

    def checked(self) -> FleetSettings:
        """Return self. Raise `FleetSettingsError` for the first invalid setting."""
        low, high = self.bounds
        if not 0 <= low <= high or not 1 <= high <= MAX_REPLICAS:
            raise FleetSettingsError(f"bounds: {low} to {high} replicas: use 0 <= minimum <= maximum <= {MAX_REPLICAS}")
        if not low <= self.first_replicas <= high:
            raise FleetSettingsError(f"start_replicas: {self.first_replicas} is not between {low} and {high}")
        start = self.cold_start
        for name in ("schedule_s", "pull_s", "load_s", "warm_s", "spread"):
            _check("cold_start." + name, getattr(start, name))
        for name in ("drain_timeout_s", "crash_mean_s"):
            _check(name, getattr(self, name))
        if not self.slowness or not all(0 < each < math.inf for each in self.slowness):
            raise FleetSettingsError(f"slowness: {self.slowness} must be one or more numbers above 0")
        if self.adapters is not None and self.adapters.num_slots < 1:
            raise FleetSettingsError(f"adapters.num_slots: {self.adapters.num_slots} must be at least 1")
        if self.adapters is not None:
            _check("adapters.load_s", self.adapters.load_s)
        try:
            check_policy(self.routing_policy)
        except ValueError as error:
            raise FleetSettingsError(f"routing_policy: {error}") from error
        if self.max_attempts < 1:
            raise FleetSettingsError(f"max_attempts: {self.max_attempts} must be at least 1")
        return self


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise FleetSettingsError(f"{name}: {value} must be a number of 0 or more")
