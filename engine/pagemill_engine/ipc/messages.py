"""Messages between the HTTP process and the engine process: tagged msgspec structs, msgpack on the wire.

To the engine: `AddRequest`, `Abort`, `RaiseAllowance`, `LoadAdapter`, `ForgetAdapter`, `Sleep`, `Wake`, `Shutdown`.
From the engine: `LoadProgress` while starting, then `Ready`, then `StepOutputs` after every step and while idle,
`Heartbeat` every second, `AdapterRead`, `Slept` and `Awake` in answer to `LoadAdapter`, `Sleep` and `Wake`, and `Fatal`
before it exits because of a fault.
"""

from __future__ import annotations

import msgspec

from pagemill_engine.limits import SchedulerLimits
from pagemill_execution.sizing.memory import MemoryBudget
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.state import EngineLoad, RankTimes, StepTimeParams
from pagemill_protocol.request.generate import FinishReason, GenerateRequest


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort a client request, or one choice of it (a stop string was found in its text)."""

    request_id: str
    choice: int | None = None


class RaiseAllowance(msgspec.Struct, frozen=True, tag="allowance"):
    """Raise the number of tokens that each sequence of a client request may generate; never lowers it."""

    request_id: str
    allowance: int


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read an adapter and accept requests for it. Answered by `AdapterRead`."""

    number: int
    """Repeated in the answer."""
    path: str
    pinned: bool = False
    """Keep it in memory as long as there is room."""


class ForgetAdapter(msgspec.Struct, frozen=True, tag="forget_adapter"):
    """Accept no further requests for an adapter. Running ones keep it."""

    digest: str


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Free the memory of the KV cache as soon as nothing runs, and keep the weights. Answered by `Slept`."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Become ready again, or cancel a `Sleep` that was not carried out yet. Answered by `Awake`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now."""


ToEngine = AddRequest | Abort | RaiseAllowance | LoadAdapter | ForgetAdapter | Sleep | Wake | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A phase of the start, with the reason for the wait."""

    phase: str
    """`loading`, `allocating`, `warming`, `first_token`."""
    detail: str
    elapsed_s: float


class AdapterRead(msgspec.Struct, frozen=True, kw_only=True, tag="adapter", omit_defaults=True):
    number: int
    digest: str = ""
    """Empty: the adapter is refused, for `reason` and `message` (`AdapterError`)."""
    reason: str = ""
    message: str = ""
    """Why it is refused, or a warning."""
    num_bytes: int = 0
    load_ms: float = 0.0


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The adapters in the engine process, by digest."""

    slots: AdapterSlots = AdapterSlots()
    """Without the names of adapters, which only the HTTP process knows."""
    running: list[str] = []
    """Those with requests that have a slot."""
    waiting: list[str] = []
    """Those with requests that wait for a load or a slot."""
    num_loads: int = 0
    num_evictions: int = 0
    """Numbers since the engine's start."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model has generated a token, and the engine accepts requests."""

    limits: SchedulerLimits
    """What the scheduler admits by, so that the server refuses the same requests before they are sent."""
    weight_bytes: int
    kv_bytes_per_token: int
    compute: str
    device: str
    """`cpu`, `cuda` or `null`."""
    load_s: float
    """Seconds from opening the model until now."""
    start_s: dict[str, float] = {}
    """Seconds by phase: `load`, `warm`, `first_token`."""
    load: EngineLoad
    """The load at the start. Without it gateways would assume unlimited capacity."""
    memory: MemoryBudget | None = None
    """Memory of the engine; None for a simulated device."""


class LogprobsOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one choice of one request.

    Excluded from garbage collection: there is one per row and step, in no reference cycle.
    """

    request_id: str
    choice: int = 0
    token_ids: list[int] = []
    logprobs: list[LogprobsOut] | None = None
    prompt_logprobs: list[LogprobsOut] = []
    """Log probabilities of the prompt's tokens from the second on, if asked for; on the first output of a request."""
    pooled: bytes = b""
    """The vector or the score of the prompt, instead of tokens: float32, little-endian."""
    num_proposed: int = 0
    """Tokens that were proposed for the choice in this step."""
    num_accepted: int = 0
    """Those of them that were sampled."""
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
    """Seconds from arrival to first scheduling; on the first output."""


class PrefixEvents(msgspec.Struct, frozen=True, omit_defaults=True):
    added: list[bytes] = []
    removed: list[bytes] = []


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    outputs: list[TokensOut] = []
    load: EngineLoad = EngineLoad()
    step_time: StepTimeParams | None = None
    prefixes: PrefixEvents | None = None
    num_step_tokens: int = 0
    gained_ms: float = 0.0
    """Milliseconds that proposed tokens have saved since the last report, by the predictions they were chosen by;
    negative where they cost more."""
    adapters: AdapterUse | None = None
    """If it has changed."""
    num_added: int = 0
    """Number of requests since the start that had arrived when `load` was computed."""
    ranks: RankTimes | None = None
    """Now and then, of an engine with several."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sign of life of the process, however long its step takes.

    A thread sends it every second once the engine is ready.
    """

    expected_step_ms: float = 0.0
    """Predicted time of the steps that were begun and not reported; 0 if there are none."""


class Slept(msgspec.Struct, frozen=True, tag="slept"):
    """The engine sleeps, or could not sleep because of `fault` and continues."""

    released_bytes: int = 0
    """Freed bytes of the device."""
    fault: str = ""


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """The engine has generated a token after waking up and accepts requests."""

    wake_s: float = 0.0
    """Seconds since the request to wake; 0 if it was not asleep."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine process cannot start or continue. `reason` is CamelCase, `message` names the remedy."""

    reason: str
    message: str


FromEngine = LoadProgress | Ready | StepOutputs | Heartbeat | AdapterRead | Slept | Awake | Fatal
