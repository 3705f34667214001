"""What a gateway tells the leading operator about each deployment: the load stream.

Each `LoadFrame` is the whole picture of one gateway; frames come on change, at once when somebody begins to wait, and
every few seconds otherwise, as length-prefixed msgpack (`pagemill_protocol.frames`). Every gateway hears every engine,
so `engines`, `pods`, `held` and `starts` of several gateways are views of the same thing; `queue`, `arrivals`,
`latencies` and `lengths` are each gateway's own and add up.

Missing is not zero: each group of numbers says whether it is a `value`, `unknown` (nobody has told yet) or `stale`
(somebody told once and is silent now; the numbers are the last ones, without the silent).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagemill_protocol.generate import PROTOCOL_VERSION
from pagemill_protocol.histogram import Histogram
from pagemill_protocol.state import StepTimeParams

Truth = Literal["value", "unknown", "stale"]


class EnginesLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Summed over the engines that report; source: their state streams."""

    truth: Truth = "unknown"
    age_s: float = 0.0
    """Of the oldest report in here."""
    num_reporting: int = 0
    """Engines in these sums."""
    num_blocks_total: int = 0
    num_blocks_active: int = 0
    """Held by running requests; never blocks that are only cached."""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_tokens_running: int = 0
    num_tokens_waiting: int = 0
    """Prompt tokens that engines have still to compute."""
    block_size: int = 0
    max_num_seqs: int = 0
    """Of one engine, the smallest; 0: not told."""
    max_step_tokens: int = 0
    """Of one engine, the smallest; 0: not told."""
    step_time: StepTimeParams = StepTimeParams()
    """Of the engine that has observed most steps."""


class PodsSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engines as the gateway sees them; those that have no address yet are the platform's to count."""

    loading: int = 0
    ready: int = 0
    """They take requests."""
    leaving: int = 0
    asleep: int = 0
    """They have loaded, and take requests once somebody wakes them."""


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that wait in this gateway; source: the gateway itself, always a value."""

    num_requests: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    """Of prompts and expected answers; a third of the bytes of what cannot be tokenized yet."""
    oldest_s: float | None = None
    """How long the one that waits longest has been here."""
    needs_engine: bool = False
    """The wake event: somebody waits, and no engine is there or on its way."""


class EngineHeld(msgspec.Struct, frozen=True, array_like=True):
    """What one engine would have to finish or hand over if it were removed; source: its state stream."""

    id: str
    """Of the endpoint: in a cluster the uid of its pod."""
    num_blocks_active: int = 0
    num_requests: int = 0
    """Running and waiting there, those included that were sent a moment ago."""
    num_requests_waiting: int = 0
    """Those of them that wait in the engine's own queue."""
    num_blocks_total: int = 0
    """0: not reported."""


class EngineStart(msgspec.Struct, frozen=True, array_like=True):
    """How one engine's start went; source: its state stream."""

    id: str
    """Of the endpoint: in a cluster the uid of its pod."""
    seconds: dict[str, float] = {}
    """By phase: `load`, `warm`, `first_token`; `wake`, once it has slept."""
    num_wakes: int = 0
    """Since its start."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much comes in; source: the gateway. Zero is a value."""

    truth: Truth = "unknown"
    window_s: float = 0.0
    """Seconds that the rates are taken over; less than usual after a start."""
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Prompt tokens."""
    burst_window_s: float = 0.0
    burst_requests_per_s: float = 0.0
    """Over the last few seconds."""
    idle_s: float = 0.0
    """Since a request was last here, waiting or served, or since the gateway began to serve the deployment."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of streams that ended within the last minute, as clients saw them, queues included; source: the gateway."""

    truth: Truth = "unknown"
    ttft_ms: Histogram = Histogram()
    tpot_ms: Histogram = Histogram()


class Lengths(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of the latest requests; source: the gateway."""

    truth: Truth = "unknown"
    prompt: Histogram = Histogram()
    computed: Histogram = Histogram()
    """Of the prompt, without what the prefix cache had."""
    output: Histogram = Histogram()


class DeploymentLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    namespace: str
    name: str
    engines: EnginesLoad = EnginesLoad()
    pods: PodsSeen = PodsSeen()
    held: list[EngineHeld] = []
    """By each engine that reports: the emptiest is removed first."""
    starts: list[EngineStart] = []
    """Of each engine that reports and has told."""
    asleep: list[str] = []
    """Ids of the engines that say that they sleep."""
    queue: QueueLoad = QueueLoad()
    arrivals: Arrivals = Arrivals()
    latencies: Latencies = Latencies()
    lengths: Lengths = Lengths()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class LoadFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int
    protocol_version: int = PROTOCOL_VERSION
    deployments: list[DeploymentLoad] = []
