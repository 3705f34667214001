"""Messages between the HTTP process and the engine process: tagged msgspec structs, msgpack on the wire.

To the engine: `AddRequest`, `Abort`, `RaiseAllowance`, `Sleep`, `Wake`, `Shutdown`. From the engine: `LoadProgress`
while starting, then `Ready`, then `StepOutputs` after every step that has outputs, `Slept` and `Awake` when it has done
so; `Fatal` before it exits because of a fault of its own.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.generate import FinishReason, GenerateRequest
from pagemill_protocol.pooling import PoolingSpec
from pagemill_protocol.state import EngineLoad, StepTimeParams


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop a client request, or one choice of it (a stop string was found in its text)."""

    request_id: str
    choice: int | None = None


class RaiseAllowance(msgspec.Struct, frozen=True, tag="allowance"):
    """Each sequence of a client request may generate so many tokens, if that is more than before."""

    request_id: str
    allowance: int


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """As soon as nothing runs, give the memory of the KV cache back and keep the weights. Answered by `Slept`."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Be as after the start again; a `Sleep` that was not carried out yet never is. Answered by `Awake`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now."""


ToEngine = AddRequest | Abort | RaiseAllowance | Sleep | Wake | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Why the engine is not ready yet."""

    phase: str
    """`loading`, `allocating`, `warming`, `first_token`."""
    detail: str
    elapsed_s: float


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory goes that may be used: all parts and what is free are the limit."""

    limit_bytes: int
    """Memory of the machine or of the container, whichever is less."""
    process_bytes: int
    """The engine process before it loads: interpreter and libraries, without what can be read from files again."""
    other_bytes: int
    """All else that was in use then, the server process included."""
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    """Activations of the largest step, from the model's shapes or measured."""
    measured: bool = False
    """Steps were run before the KV cache was sized: their memory is what they took, with rows, libraries and recorded
    decodes."""

    @property
    def free_bytes(self) -> int:
        """What is left when cache and step are as large as they may get. Negative: they do not fit."""
        used = self.process_bytes + self.other_bytes
        return self.limit_bytes - used - self.weight_bytes - self.kv_bytes - self.activation_bytes


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model generated a token; requests may come."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    vocab_size: int
    weights_digest: str
    kv_dtype: str
    caches_prefixes: bool = True
    pooling: PoolingSpec | None = None
    weight_bytes: int
    kv_bytes_per_token: int
    compute: str
    device: str
    """`cpu`, `cuda` or `null`."""
    load_s: float
    """From the first look at the model until now."""
    start_s: dict[str, float] = {}
    """The same by phase: `load`, `warm`, `first_token`."""
    load: EngineLoad
    """Reported at once: without it gateways would assume that the cache holds everything."""
    memory: MemoryBudget | None = None
    """`None`: a simulated device has no memory."""


class LogprobsOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """At one position: chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one choice of one request. One a row and step, in no cycle: the collector need not count them."""

    request_id: str
    choice: int = 0
    token_ids: list[int] = []
    logprobs: list[LogprobsOut] | None = None
    prompt_logprobs: list[LogprobsOut] = []
    """Of the prompt's tokens but the first, if they were asked for; on the first output of a request."""
    pooled: bytes = b""
    """In place of tokens: the vector or the score of the prompt, float32, little-endian."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; on the first output of a choice."""
    error: str | None = None
    error_status: int = 500
    error_type: str = "server_error"
    error_param: str | None = None
    error_code: str | None = None
    error_retry_after_s: float | None = None
    num_preemptions: int = 0
    queue_s: float = 0.0
    """From arrival to first scheduling; on the first output."""


class PrefixEvents(msgspec.Struct, frozen=True, omit_defaults=True):
    added: list[bytes] = []
    removed: list[bytes] = []


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    outputs: list[TokensOut] = []
    load: EngineLoad = EngineLoad()
    step_time: StepTimeParams | None = None
    prefixes: PrefixEvents | None = None
    num_step_tokens: int = 0
    num_added: int = 0
    """Requests that had arrived when `load` was computed, since the start."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The process runs, however long its step takes: sent every second once it is ready, by a thread of its own."""

    expected_step_ms: float = 0.0
    """Predicted time of what it has begun and not reported; 0: nothing."""


class Slept(msgspec.Struct, frozen=True, tag="slept"):
    """It sleeps; or, with a `fault`, it could not and goes on as before."""

    released_bytes: int = 0
    """Memory of the device that was released."""
    fault: str = ""


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """It generated a token again; requests may come."""

    wake_s: float = 0.0
    """Time since the request to wake; 0 if it was not asleep."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine process cannot start or go on. `reason` is CamelCase, `message` names the remedy."""

    reason: str
    message: str


FromEngine = LoadProgress | Ready | StepOutputs | Heartbeat | Slept | Awake | Fatal
