"""The report that an engine publishes about itself, on change, over one long stream per gateway.

One `StateFrame` is a full load report plus the prefix chunks added and removed since the previous frame. The first
frame after a connect (and after any gap in `sequence`) is a snapshot of all chunks. Frames are sent as length-prefixed
msgpack (`pagemill_protocol.frames`), at most 20 a second, and at once when other gateways must learn of a new request.
`kv_cache_usage` counts active blocks only, never reusable ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.cache_kinds import CacheKind

GATEWAY_HEADER = b"x-pagemill-gateway"
"""Header that identifies the gateway, in the request for the stream and in the acknowledgement of a drain."""

WAKE = "wake"
"""A key of `StateFrame.start_s`."""


class StepTimeParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coefficients of the step-time model (`pagemill_protocol.report.step_time`), in milliseconds."""

    knots_tokens: list[int] = []
    """Ends of the pieces of the piecewise linear part, in tokens of a step."""
    knot_ms: list[float] = []
    """Predicted time at each knot."""
    decode_context_ms: float = 0.0
    """Milliseconds per token of context that decodes read."""
    chunk_context_ms: float = 0.0
    """Milliseconds per (prefill token x context token)."""
    num_steps_observed: int = 0
    error_p50: float = 0.0
    """Median relative error of recent predictions."""
    error_p95: float = 0.0
    tokens_per_decode: float = 1.0
    """Tokens that a decode samples in a step: more than 1 where proposed tokens were right."""
    computed_per_decode: float = 1.0
    """Tokens that a decode computes in a step, proposed ones included."""
    draft_ms: float = 0.0
    """Milliseconds behind a step with decodes in which a model or a head drafts; no part of the times above."""
    stages: int = 1
    """Steps that are computed at the same time, one in each stage of a pipeline; the times are those of one stage."""


class SlowRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one process of several that compute a model together for which the others wait in each step."""

    rank: int = 0
    node: int = 0
    """The machine, or the pod of a group, that runs it, counted from that of rank 0."""
    step_ms: float = 0.0
    """How long it computes in a step, without waits, when it was found."""
    expected_ms: float = 0.0
    """How long it would at the speed of the others."""


class RankTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine of several processes reports of them."""

    computed_s: list[float] = []
    """Seconds that each rank has computed since the start, without waits for others."""
    slow: SlowRank | None = None


class Digests(msgspec.Struct, frozen=True, omit_defaults=True):
    weights: str = ""
    tokenizer_bundle: str = ""
    hash_version: int = 1
    """Version of the engine's block hashes (`pagemill_protocol.hashes`); `NO_HASHES`: its prefix cache is disabled."""
    kv_dtype: str = ""
    """Part of the root of the block hashes; empty: not reported."""


class KindBytes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes of one cache kind."""

    total: int
    active: int
    evictable: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The load of one engine at one instant, or of several together (`total_counts`).

    The scheduler computes it; gateway, operator and simulator pass it on and have no other type for these numbers.
    """

    num_kv_bytes_total: int = 0
    """Bytes of the KV cache, of all kinds."""
    num_kv_bytes_evictable: int = 0
    """Bytes of blocks that are cached and not referenced."""
    num_kv_bytes_active: int = 0
    """Bytes of blocks that running requests reference."""
    kind_bytes: list[KindBytes] = []
    """The bytes of each of several cache kinds; none: there is one."""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_tokens_running: int = 0
    """Context tokens of running requests."""
    num_tokens_waiting: int = 0
    """Prompt tokens not yet computed, of waiting and running requests."""
    step_ms: float = 0.0
    """Duration of the latest step."""
    num_preemptions: int = 0
    """Number since the engine's start."""
    num_low_priority_requests: int = msgspec.field(default=0, name="num_requests_giving_way")
    """Running and waiting requests that are low-priority and leave their sequence slots to others
    (`sampling.LOW_PRIORITY`)."""

    @property
    def num_kv_bytes_free(self) -> int:
        """Bytes of blocks that were never used or have no reusable content."""
        return self.num_kv_bytes_total - self.num_kv_bytes_active - self.num_kv_bytes_evictable

    @property
    def kv_cache_usage(self) -> float:
        return self.num_kv_bytes_active / self.num_kv_bytes_total if self.num_kv_bytes_total else 0.0

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self.num_requests_running + self.num_requests_waiting


COUNTS = tuple(name for name in EngineLoad.__annotations__ if name.startswith("num_"))
"""The fields of `EngineLoad` that add up over engines; the others are times of one engine."""


def total_counts(loads: Sequence[EngineLoad]) -> dict[str, Any]:
    """Return the sum of each of `COUNTS` by field name."""
    return {name: sum(getattr(load, name) for load in loads) for name in COUNTS}


class StateFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int
    snapshot: bool = False
    """`prefixes_added` contains all chunks; those of earlier frames are obsolete."""
    load: EngineLoad = EngineLoad()
    step_time: StepTimeParams = StepTimeParams()
    digests: Digests = Digests()
    block_size: int = 16
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    """Requests that may run at once; 0: not reported."""
    kinds: list[CacheKind] = []
    """The cache kinds of the model's layers, without the numbers of these; none: one whose blocks count as a byte.
    Prefix chunks of the first kind are named by their hashes, those of further kinds by `hashes.key_of_kind`."""
    prefix_chunk_blocks: int = 0
    """Blocks per prefix chunk (`pagemill_protocol.hashes`); 0: not reported, which means the fewest with 64 tokens."""
    further_chunk_blocks: int = 0
    """Blocks per prefix chunk of the kinds behind the first; 0: as many as those of the first. Where they are fewer, a
    chunk of these kinds is reported only while the first kind has the block as well."""
    start_s: dict[str, float] = {}
    """Seconds of each phase of the engine's start, `load`, `warm`, `first_token`, and of its latest `wake`; empty: not
    reported."""
    models: list[str] = []
    """Names that the engine serves: the model and its aliases. Those of adapters are in `adapters`."""
    pools: bool = False
    """The engine answers with vectors or scores, not with text."""
    unused_settings: list[str] = []
    """Settings of the engine that have no effect with this kind of model."""
    adapters: AdapterSlots = AdapterSlots()
    slow_rank: SlowRank | None = None
    """The process of a model divided among several that is much slower than the others."""
    draining: bool = False
    sleeping: bool = False
    """Accepts no requests until it is woken: its weights are loaded, but it has no KV cache."""
    num_wakes: int = 0
    """Number since the engine's start."""
    silent_s: float = 0.0
    """Seconds since the engine process last reported to the HTTP process that sends this; 0 while it reports every
    second. A step of a large prompt may take long; if the value keeps growing, the engine is stuck."""
    expected_step_ms: float = 0.0
    """While `silent_s` is reported: predicted time of the steps that the engine process has begun; 0: not known."""
    frozen_s: float = 0.0
    """Seconds without a heartbeat of the engine process, which sends one every second however long its step takes; 0
    while heartbeats arrive."""
    prefixes_added: list[bytes] = []
    """Chained hashes of prefix chunks of `prefix_chunk_blocks` blocks each, now in the prefix cache."""
    prefixes_removed: list[bytes] = []
