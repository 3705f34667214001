"""What an engine tells its gateways about itself, pushed on change over one long stream per gateway.

One `StateFrame` is a full load report plus the prefix granules added and removed since the frame before; the first
frame after a connect (and after any gap in `sequence`) is a snapshot of all granules. Sent as length-prefixed msgpack
(`pagemill_protocol.frames`), at most 20 a second, and at once where another gateway is to know of a request that has
come. `kv_cache_usage` counts active blocks only, never reusable ones.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.generate import PROTOCOL_VERSION

GATEWAY_HEADER = b"x-pagemill-gateway"
"""On the request for the stream and on the acknowledgement of a drain: which gateway it is, the same on both."""

WAKE = "wake"
"""In `StateFrame.start_s`."""


class StepTimeParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coefficients of the step-time model (`pagemill_protocol.step_time`), in milliseconds."""

    knots_tokens: list[int] = []
    """Ends of the pieces of the piecewise linear part, in tokens of a step."""
    knot_ms: list[float] = []
    """Predicted time at each knot."""
    decode_context_ms: float = 0.0
    """Per token of context read by decodes."""
    chunk_context_ms: float = 0.0
    """Per (prefill token x context token)."""
    num_steps_observed: int = 0
    error_p50: float = 0.0
    """Median relative error of recent predictions."""
    error_p95: float = 0.0


class Digests(msgspec.Struct, frozen=True, omit_defaults=True):
    weights: str = ""
    tokenizer_bundle: str = ""
    hash_version: int = 1
    """Of its block hashes (`pagemill_protocol.hashes`); `NO_HASHES`: its prefix cache is switched off."""
    kv_dtype: str = ""
    """What the root of the block hashes mixes in besides the weights; empty: an engine that does not say."""
    protocol_version: int = PROTOCOL_VERSION


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's load at one instant. Produced by the scheduler, read by router and autoscaler."""

    num_blocks_total: int = 0
    num_blocks_free: int = 0
    """Never used, or no longer holding reusable content."""
    num_blocks_evictable: int = 0
    """Cached, not referenced: free for the taking."""
    num_blocks_active: int = 0
    """Referenced by a running request."""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_tokens_running: int = 0
    """Context tokens held by running requests."""
    num_tokens_waiting: int = 0
    """Prompt tokens not yet computed, of waiting and running requests."""
    step_ms: float = 0.0
    """Duration of the latest step."""
    num_requests_prefilling: int = 0
    """Running ones that have prompt tokens left, those of the step in flight not counted."""
    num_tokens_prefilling: int = 0
    """Of `num_tokens_waiting`, those of running requests."""
    num_tokens_prefilled: int = 0
    """Of `num_tokens_running`, those of running requests that have prompt tokens left."""
    step_in_flight_ms: float = 0.0
    """How long the step takes that began when this was told; 0: none did, its loop decides one after the other."""
    step_drift: float = 0.0
    """How far the latest steps were off the step-time model (`pagemill_protocol.step_drift`)."""
    num_preemptions: int = 0
    """Since start."""

    @property
    def kv_cache_usage(self) -> float:
        return self.num_blocks_active / self.num_blocks_total if self.num_blocks_total else 0.0


class AdapterSlots(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The LoRA adapters that an engine holds, by the digests of their contents."""

    num_slots: int = 0
    """Adapters that may be resident at once; 0: it serves none."""
    resident: list[str] = []
    """A request for one of these waits for no load."""
    loading: list[str] = []
    """Their loads run or wait, in this order."""
    load_ms: float = 0.0
    """What loading one takes: by the latest loads, before the first as declared; 0: not told."""


class StateFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sequence: int
    snapshot: bool = False
    """`prefixes_added` holds everything; forget what was known before."""
    load: EngineLoad = EngineLoad()
    load_age_ms: float = 0.0
    """How long before this was sent the engine told `load`: nothing about its clock needs to be known."""
    step_time: StepTimeParams = StepTimeParams()
    digests: Digests = Digests()
    block_size: int = 16
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    """Requests that may run at once; 0: not told."""
    granule_blocks: int = 0
    """Blocks of one granule (`pagemill_protocol.hashes`); 0: not told, the fewest that hold 64 tokens."""
    start_s: dict[str, float] = {}
    """Seconds that its start took by phase, `load`, `warm`, `first_token`, and its latest `wake`; empty: not told."""
    models: list[str] = []
    """Names this engine answers to: the model, its aliases and adapters."""
    adapters: AdapterSlots = AdapterSlots()
    draining: bool = False
    sleeping: bool = False
    """It takes no requests until somebody wakes it up: its weights are loaded, a KV cache it has none."""
    num_wakes: int = 0
    """Since its start."""
    silent_s: float = 0.0
    """How long the engine process has said nothing to the process that sends this; 0 while it speaks every second. One
    step of a large prompt may take long; when it grows without end the engine is stuck."""
    prefixes_added: list[bytes] = []
    """Chained hashes of granules of `granule_blocks` blocks each, now in the prefix cache."""
    prefixes_removed: list[bytes] = []
