"""The load stream: the load of each deployment, which a gateway publishes to the leading operator.

Each `LoadFrame` is the complete state of one gateway. Frames are sent on change, at once when a request begins to wait,
and every few seconds otherwise, as length-prefixed msgpack (`pagemill_protocol.frames`). Every gateway receives the
reports of every engine, so `engines`, `pods`, `replicas` and `starts` of several gateways describe the same engines;
`queue`, `arrivals`, `latencies` and `lengths` are each gateway's own and add up.

Missing is not zero: each group of numbers is a `value`, `unknown` (never reported) or `stale` (reported before, silent
now: the last numbers, without the silent engines).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_protocol.report.adapters import AdapterStatus
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.histogram import Histogram
from pagemill_protocol.report.state import EngineLoad, SlowRank, StepTimeParams

ReportStatus = Literal["value", "unknown", "stale"]


class EnginesLoad(EngineLoad, frozen=True, kw_only=True, omit_defaults=True):
    """The load of all engines that report: the sums of their counts, and their smallest limits; source: their state
    streams. Times of single steps are 0."""

    truth: ReportStatus = "unknown"
    age_s: float = 0.0
    """Age of the oldest report in the sums."""
    num_reporting: int = 0
    """Engines in these sums."""
    block_size: int = 0
    """The smallest value of any engine; 0: not reported."""
    kinds: tuple[CacheKind, ...] = ()
    """The cache kinds of their model, as engines report them."""
    max_num_seqs: int = 0
    """The smallest value of any engine; 0: not reported."""
    max_step_tokens: int = 0
    """The smallest value of any engine; 0: not reported."""
    step_time: StepTimeParams = StepTimeParams()
    """Step-time model of the engine that has observed most steps."""
    step_time_ratios: tuple[float, ...] = ()
    """Step times of the engines that know theirs, as multiples of those of `step_time`, in rising order."""


class PodCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engines as the gateway sees them; engines without an address are counted by the platform only."""

    loading: int = 0
    ready: int = 0
    """Engines that accept requests."""
    leaving: int = 0
    asleep: int = 0
    """Engines that are loaded and accept requests once they are woken."""


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that wait in this gateway; source: the gateway itself, always a value."""

    num_requests: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    """Tokens of prompts and expected answers; for text that cannot be tokenized yet, a third of its bytes."""
    oldest_s: float | None = None
    """Waiting time of the oldest request."""
    needs_engine: bool = False
    """The wake event: requests wait, and no engine is running or starting."""


class EngineReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of one engine as its state stream reported it, and its requests from the gateway that passes it on."""

    id: str
    """Id of the endpoint: in a cluster the uid of its pod."""
    load: EngineLoad = EngineLoad()
    num_in_flight: int = 0
    """Requests of this gateway at the engine; `load` may not count those sent a moment ago."""
    adapters: list[AdapterStatus] = []
    """What the engine did with each LoRA adapter that it was asked to serve."""
    slow_rank: SlowRank | None = None
    """As the engine reports it."""

    @property
    def num_requests(self) -> int:
        """Requests running and waiting at the engine, including those sent a moment ago."""
        return max(self.load.num_requests, self.num_in_flight)


class EngineStart(msgspec.Struct, frozen=True, array_like=True):
    """The phases of one engine's start; source: its state stream."""

    id: str
    """Id of the endpoint: in a cluster the uid of its pod."""
    seconds: dict[str, float] = {}
    """Phase -> seconds: `load`, `warm`, `first_token`; `wake` once it has slept."""
    num_wakes: int = 0
    """Times it was woken since its start."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arrival rates of requests; source: the gateway. Zero is a value."""

    truth: ReportStatus = "unknown"
    window_s: float = 0.0
    """Seconds over which the rates are measured; shorter after a start."""
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Prompt tokens."""
    burst_window_s: float = 0.0
    burst_requests_per_s: float = 0.0
    """Rate over the last few seconds."""
    idle_s: float = 0.0
    """Seconds since a request was last waiting or running, or since the gateway began to serve the deployment."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latencies of streams that ended within the last minute, as clients saw them, queues included; source: the
    gateway."""

    truth: ReportStatus = "unknown"
    ttft_ms: Histogram = Histogram()
    tpot_ms: Histogram = Histogram()


class Lengths(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of the latest requests; source: the gateway."""

    truth: ReportStatus = "unknown"
    prompt: Histogram = Histogram()
    computed: Histogram = Histogram()
    """Prompt tokens that were not in the prefix cache."""
    output: Histogram = Histogram()


class DeploymentLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    namespace: str
    name: str
    engines: EnginesLoad = EnginesLoad()
    pods: PodCounts = PodCounts()
    starts: list[EngineStart] = []
    """Starts of the engines that report them."""
    asleep: list[str] = []
    """Ids of the engines that report sleeping."""
    queue: QueueLoad = QueueLoad()
    arrivals: Arrivals = Arrivals()
    latencies: Latencies = Latencies()
    lengths: Lengths = Lengths()
    replicas: list[EngineReport] = []
    """One entry per reporting engine; the engine with the least load is removed first."""
    unused_settings: list[str] = []
    """Settings of which an engine reports that they have no effect with this kind of model."""
    routing_policies: list[str] = []
    """The gateway's routing policies where the deployment's own is not among them; empty: it is."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class LoadFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int
    deployments: list[DeploymentLoad] = []
