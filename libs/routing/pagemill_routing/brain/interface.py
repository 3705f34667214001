"""The interface of the brain for relays: its calls and their values.

Relay and brain may be in different processes (`pagemill_gateway.ipc`), so all arguments and results are plain values.
Coroutines are calls with a reply, and functions are notifications.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import msgspec

from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.sampling import is_low_priority

EngineFailureKind = Literal["lost", "killed", "crashed", "stalled"]
FailureKind = Literal["refused", "declined", "unreachable", "lost", "killed", "stalled", "crashed", "broken", "request"]
"""`refused`: the engine works but is full. `declined`: it accepts no requests, because it starts or shuts down.
`unreachable`: no process listens at its address. `lost`: the connection ended without an error message. `killed`: the
engine's server reported that the engine was ended from outside. `stalled`: it stopped sending. `crashed`: its server
reported that its own work failed. `broken`: it sent invalid frames, or fails every request. `request`: the engine works
but failed this request.
"""

UNSERVED_FAILURES: frozenset[FailureKind] = frozenset({"refused", "declined", "unreachable"})
"""The failures after which no engine has worked on the request."""

Probe = Literal["none", "shared", "alone"]
"""How a request that may bring down engines is probed: `none`, it is not suspected; `shared`, on an engine without
another probe; `alone`, on an engine where no other request starts in the meantime.
"""

Liveness = Literal["working", "silent", "stuck"]
"""`working`: the engine reports its state and completes steps. `silent`: its state stream is silent. `stuck`: its
server reports that the engine process has completed no step for too long.
"""

NOT_READY = "model_not_ready"
"""The error code if a deployment has no serving engine."""
OTHER_WEIGHTS = "other_weights"
"""The error code if engines are available, but none has the weights that an answer was begun with."""
MAX_REROUTES = 2
"""After more refusals in a row a request waits in the queue."""


class QueueTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's place in the queue: key, priority, size and deadline. Times are of the monotonic clock."""

    key: str = ""
    """The key whose fair share is used; empty for requests without a key."""
    priority: int = 0
    """Smaller values are served first."""
    num_bytes: int = 0
    """The size of the request's body."""
    arrived_at: float = 0.0
    deadline_at: float = math.inf
    waited_s: float = 0.0
    """The time already spent in queues, which counts for the queue's timeout."""
    num_sequences: int = 1
    max_tokens: int | None = None
    """The client's limit for the answer; the expected length depends on it."""
    num_refusals: int = 0
    """The refusals by engines since it last left the queue."""
    paid: bool = False
    """Whether its key has paid for its turn, because it was at an engine before."""
    num_logprobs: int = 0
    """The log probabilities that each token of the answer carries beside its own."""

    @property
    def is_low_priority(self) -> bool:
        """Whether it has low priority, as lines of batches have: it gives way to others and needs no more engines."""
        return is_low_priority(self.priority)


DEFAULT_TICKET = QueueTicket()
"""The ticket of a request without a key that has just arrived."""


class EngineFailure(NamedTuple):
    """An engine that ended or fell silent while it had a request."""

    decision: int
    kind: EngineFailureKind
    probe: Probe = "none"
    """The probe that the request was."""
    progressed: bool = False
    """Whether the request got a token from the engine, which ends a probe."""


class RetryContext(NamedTuple):
    """The reason of a retry, and the requirements for its engine."""

    decision: int
    """The decision that failed."""
    endpoint_id: str
    kind: FailureKind
    weights_digest: str = ""
    """The weights that can continue the answer; empty if it has no tokens yet."""
    num_tokens: int = 0
    """The generated tokens of all sequences, which the next engine computes along with the prompt."""
    engine_failures: tuple[EngineFailure, ...] = ()
    """The engines that ended or fell silent with the request so far, in order."""
    content: bytes = b""
    """The hash of the request's content, if engines ended with it."""


class CompletedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The measurements of a completed request."""

    num_output_tokens: int
    """The tokens of all sequences and from all engines."""
    ms_per_token: float | None = None
    """The mean time between the last engine's tokens; `None` if there were too few."""


class HashScheme(NamedTuple):
    """The parameters of block hashes, besides token ids and salt."""

    weights_digest: str
    kv_dtype: str
    block_size: int
    prefix_chunk_blocks: int

    @property
    def prefix_chunk_tokens(self) -> int:
        return self.block_size * self.prefix_chunk_blocks


class RoutingRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The properties of one engine request for routing. It contains no text and no tokens."""

    num_prompt_tokens: int
    prefix_chunks: tuple[bytes, ...] = ()
    """The hashes of the prompt's full prefix chunks, with the target's scheme and the caller's salt."""
    prefix_chunk_tokens: int = 0
    prompt_key: bytes = b""
    """The hash of the prompt's first characters."""
    session: bytes = b""
    """The hash of the client's session; empty if there is none."""
    adapter_digest: str = ""
    """The digest of the requested adapter; empty if there is none."""


class Target(NamedTuple):
    """The deployment of a request, with the values that are needed to prepare the request for its engines."""

    deployment: str
    """`namespace/deployment`."""
    model: str
    """The deployment's model name; clients may have used an alias."""
    bundle_digest: str
    """The tokenizer bundle of the engines that may get the request; token ids are valid only for it."""
    max_model_len: int
    chat_template: str | None
    prefix_scope: str
    scheme: HashScheme
    parsers: ParserSettings = ParserSettings()
    session_header: str = ""
    """The header's name in lower case; empty if the deployment has none."""
    queued_s: float = 0.0
    """The time that the request waited for a target."""
    adapter_digest: str = ""
    """The digest of the adapter that the client named; empty if it named the model."""


class Assignment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's assignment to an endpoint, which counts until `finished`, `failed` or `withdrawn`."""

    decision: int
    endpoint_id: str
    data_url: str
    token: str
    policy: str = ""
    believed: bool = False
    """Whether the decision used a fresh report of the endpoint, not only this gateway's counts."""
    predicted_cached_tokens: int = 0
    prefix_chunk_tokens: int = 0
    """The tolerance of the prediction: fewer additional cached tokens than this are in no report."""
    predicted_ttft_ms: float | None = None
    """The time from the decision to the first token by which the policy chose; `None` if it predicts none."""
    queued_s: float = 0.0
    """The time that the request waited for capacity."""
    probe: Probe = "none"


class RequestOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The measurements of one completed client request, as its client saw it."""

    deployment: str
    """`namespace/deployment`."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: float | None = None
    """The time from arrival to the first token, including waits; only for streams."""
    tpot_ms: float | None = None
    """The mean time per token after the first; only for streams."""


class ServedName(NamedTuple):
    """A name, alias or adapter that clients may request."""

    name: str
    model: str
    """The deployment's model name; for an adapter, that of its base model."""
    max_model_len: int | None
    """The smallest limit of the usable engines; `None` if there are none."""
    is_adapter: bool = False
    source: str = ""
    """Of an adapter: where its engines have it from; empty while none reports it."""
    pools: bool = False
    """Whether its engines answer with vectors or scores instead of text."""


class Brain(Protocol):
    async def names(self) -> list[ServedName]:
        """Return all names, aliases and adapters, whether or not an engine serves them now."""
        ...

    async def look_up(self, model: str) -> Target:
        """Return the target for a name or alias.

        Raises `PagemillError` 404 for an unknown name, and 503 with the reason if no engine is ready.
        """
        ...

    async def find(self, model: str, ticket: QueueTicket = DEFAULT_TICKET) -> Target:
        """Return the target like `look_up`, but wait in the deployment's queue for an engine that is expected."""
        ...

    async def choose(
        self,
        target: Target,
        tried: frozenset[str],
        request: RoutingRequest,
        *,
        ticket: QueueTicket = DEFAULT_TICKET,
        retry: RetryContext | None = None,
    ) -> Assignment:
        """Choose an endpoint with capacity, preferably not in `tried`; wait in the queue until there is one.

        Raises `PagemillError` 503 if there is no engine or the wait was too long, and 429 if the queue is full. With
        `retry`, also raises 503 if the retry budget is used up or (`OTHER_WEIGHTS`) no engine can continue the answer,
        and 500 if the request is blamed for bringing down engines.
        """
        ...

    async def idle_capacity(self, model: str, max_load: float) -> int:
        """Return the number of low-priority requests for `model` that may start now; 0 while a request waits for it.

        `max_load` is the share of an engine's sequence slots and blocks up to which it may be filled.
        """
        ...

    def accepted(self, assignment: Assignment) -> None:
        """Note that the engine has accepted the request, so that its next reports count it."""
        ...

    def started(self, assignment: Assignment, ttft_ms: float | None = None) -> None:
        """Note the first frame; for a stream, it arrived `ttft_ms` after the request was sent."""
        ...

    def freed(self, assignment: Assignment) -> None:
        """Note that the endpoint has computed the request, although its client has not read the whole answer."""
        ...

    async def liveness(self, endpoint_id: str) -> Liveness:
        """Return the liveness of an engine that is silent in an answer; the relay waits for one that works."""
        ...

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        """Return how much longer the ticket's request will wait, in seconds; `None` if unknown."""
        ...

    def finished(self, assignment: Assignment, served: CompletedRequest | None = None) -> None:
        """Note that the request left the endpoint: completed, or for a reason that is not the endpoint's fault."""
        ...

    def failed(self, assignment: Assignment, kind: FailureKind) -> None:
        """Note that the endpoint failed the request."""
        ...

    def withdrawn(self, assignment: Assignment) -> None:
        """Cancel an assignment whose request was not sent, because its client disconnected."""
        ...

    def record_outcome(self, outcome: RequestOutcome) -> None:
        """Note the outcome of a client request with all its engine requests."""
        ...
