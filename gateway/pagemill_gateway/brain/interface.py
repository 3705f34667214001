"""What a relay may ask of the brain: a few calls and the values they pass.

Relay and brain need not live in one process (`pagemill_gateway.ipc`), so everything here is a plain value: the
coroutines are questions with an answer, the others are notifications without one.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

from pagemill_protocol.answers.registry import ParserSettings
from pagemill_protocol.sampling import gives_way

EngineFailureKind = Literal["lost", "killed", "crashed"]
FailureKind = Literal["refused", "declined", "unreachable", "lost", "killed", "stalled", "crashed", "broken", "request"]
"""`refused`: the engine works but is full. `declined`: it is shutting down or starting and takes nothing.
`unreachable`: no process listens at its address. `lost`: the connection ended without an error message. `killed`: it
reported that it was ended from outside. `stalled`: it sends nothing any more. `crashed`: it reported that its own work
brought it down. `broken`: it sent invalid frames, or fails every request. `request`: the engine works but failed this
one request.
"""

UNSERVED: frozenset[FailureKind] = frozenset({"refused", "declined", "unreachable"})
"""No engine has worked for the request."""

Probe = Literal["none", "shared", "alone"]
"""How a request that may bring down engines is tried: `none`, it is not thought to; `shared`, on an engine without
another such request; `alone`, on an engine where no other request starts meanwhile.
"""

Liveness = Literal["working", "silent", "stuck"]
"""`working`: the engine reports its state and makes steps. `silent`: its state stream is silent. `stuck`: its server
reports that the engine process has made no step for too long.
"""

NOT_READY = "model_not_ready"
"""Code of the refusal while a deployment has no engine that serves."""
OTHER_WEIGHTS = "other_weights"
"""Code of the error when engines are available, but none with the weights that an answer was begun with."""
MAX_REROUTES = 2
"""After this many refusals in a row a request goes to the queue."""


class QueueTicket(NamedTuple):
    """A waiting request's place in the queue: key, priority, size and deadline. Times are of the monotonic clock."""

    key: str = ""
    """Keys share the queue fairly; empty: all requests without a key."""
    priority: int = 0
    """Smaller is served first."""
    num_bytes: int = 0
    """Of the request's body."""
    arrived_at: float = 0.0
    deadline_at: float = math.inf
    waited_s: float = 0.0
    """In queues before; the queue's timeout counts all of them."""
    num_sequences: int = 1
    max_tokens: int | None = None
    """The client's limit on the answer; the expected length depends on it."""
    num_refusals: int = 0
    """By engines since it last left the queue."""
    paid: bool = False
    """It was at an engine before: its key has paid for its turn."""

    @property
    def gives_way(self) -> bool:
        """To all others, as a batch's line does: it is no reason for another engine."""
        return gives_way(self.priority)


DEFAULT_TICKET = QueueTicket()
"""A request without a key that has just arrived."""


class EngineFailure(NamedTuple):
    """An engine that ended while it had a request."""

    decision: int
    kind: EngineFailureKind
    probe: Probe = "none"
    """The probe that the request was there for."""
    progressed: bool = False
    """The request got a token there: its probe, if it was one, was over."""


class RetryContext(NamedTuple):
    """Why a request is tried once more, and what its next engine must have."""

    decision: int
    """The one that failed."""
    endpoint_id: str
    kind: FailureKind
    weights_digest: str = ""
    """Part of the answer exists: only these weights can continue it. Empty: any weights may begin it."""
    num_tokens: int = 0
    """Of that part, all sequences together: the next engine computes them along with the prompt."""
    engine_failures: tuple[EngineFailure, ...] = ()
    """Engines that ended with it so far, in order."""


class CompletedRequest(NamedTuple):
    """How a request was served to its end."""

    num_output_tokens: int
    """Of all sequences, whichever engines they came from."""
    ms_per_token: float | None = None
    """Between the first and the last token of the last engine; `None`: too few tokens to measure it."""


class HashScheme(NamedTuple):
    """What the block hashes of a deployment's engines depend on, besides token ids and salt."""

    weights_digest: str
    kv_dtype: str
    block_size: int
    prefix_chunk_blocks: int

    @property
    def prefix_chunk_tokens(self) -> int:
        return self.block_size * self.prefix_chunk_blocks


class RoutingRequest(NamedTuple):
    """What routing may know of one engine request. It holds no text and no token of it."""

    num_prompt_tokens: int
    prefix_chunks: tuple[bytes, ...] = ()
    """Hashes of the prompt's full prefix chunks under the target's scheme and the caller's salt."""
    prefix_chunk_tokens: int = 0
    prompt_key: bytes = b""
    """Hash of the prompt's first characters."""
    session: bytes = b""
    """Hash of the session that the client named; empty: none."""
    adapter_digest: str = ""
    """Content of the adapter it is for; empty: none."""


class Target(NamedTuple):
    """The deployment a request was given to, with what is needed to prepare the request for its engines."""

    deployment: str
    """`namespace/deployment`."""
    model: str
    """The deployment's own name for what it serves; clients may have used an alias."""
    bundle_digest: str
    """Tokenizer bundle of the engines that may get the request; token ids mean nothing elsewhere."""
    max_model_len: int
    chat_template: str | None
    prefix_scope: str
    scheme: HashScheme
    parsers: ParserSettings = ParserSettings()
    session_header: str = ""
    """Lower case; empty: the deployment has none."""
    queued_s: float = 0.0
    """How long the request waited before a target was found."""
    adapter_digest: str = ""
    """Content of the adapter that the client named; empty: it named the model."""


class Assignment(NamedTuple):
    """A request's assignment to an endpoint: accounted from the moment it is made until `finished`, `failed` or
    `withdrawn`.
    """

    decision: int
    endpoint_id: str
    data_url: str
    token: str
    policy: str = ""
    believed: bool = False
    """The endpoint's own fresh report was used, not only this gateway's counts."""
    predicted_cached_tokens: int = 0
    prefix_chunk_tokens: int = 0
    """What the engine finds beyond the prediction and below this much more is not an error: no report could have shown
    it.
    """
    predicted_ttft_ms: float | None = None
    """From the decision to the first token; `None`: the policy did not predict any."""
    queued_s: float = 0.0
    """How long the request waited for capacity; 0: it did not."""
    probe: Probe = "none"
    has_link: bool = False
    """The endpoint takes requests over a link (`pagemill_protocol.link`), else over HTTP only."""


class RequestOutcome(NamedTuple):
    """How one client request that came to its own end was served, as its client saw it."""

    deployment: str
    """`namespace/deployment`."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: float | None = None
    """From its arrival, waits included; only for streams."""
    tpot_ms: float | None = None
    """Per token after the first; only for streams."""


class ServedName(NamedTuple):
    """A name, alias or adapter that clients may ask for."""

    name: str
    model: str
    """The deployment's own name for it; of an adapter, for the model that it belongs to."""
    max_model_len: int | None
    """Of the engines that serve it now; `None`: none does."""
    is_adapter: bool = False
    pools: bool = False
    """Its engines answer with vectors or scores, not with text."""


class Brain(Protocol):
    async def names(self) -> list[ServedName]:
        """All names and aliases, whether an engine serves them now or not."""
        ...

    async def look_up(self, model: str) -> Target:
        """The deployment that takes a request for the name or alias `model`.

        Raises `PagemillError`: 404 for an unknown name, 503 with the reason when no engine is ready yet.
        """
        ...

    async def find(self, model: str, ticket: QueueTicket = DEFAULT_TICKET) -> Target:
        """As `look_up`, but waits in the deployment's queue for an engine that is expected to start or to return."""
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
        """An endpoint with capacity, preferring those not in `tried`; waits in the deployment's queue until there is
        one.

        Raises `PagemillError`: 503 when there is no engine at all or the wait was too long, 429 when the queue is full.
        With `retry` also when the retry budget is spent, or (`OTHER_WEIGHTS`) when no engine could continue the answer;
        500 when the request is blamed for bringing down engines.
        """
        ...

    async def idle_capacity(self, model: str, max_load: float) -> int:
        """Requests without a hurry for `model` that may be started now; 0 while a request waits for it.

        `max_load`: the share of an engine's most sequences up to which it may be filled.
        """
        ...

    def accepted(self, assignment: Assignment) -> None:
        """The engine has taken the request: its next reports count it."""
        ...

    def started(self, assignment: Assignment, ttft_ms: float | None = None) -> None:
        """The first frame arrived; for a stream, `ttft_ms` after the request was sent."""
        ...

    async def liveness(self, endpoint_id: str) -> Liveness:
        """What is known of an engine that sends nothing in an answer; one that works is waited for."""
        ...

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        """How much longer the waiting request of `ticket` will wait for an engine; `None`: unknown."""
        ...

    def finished(self, assignment: Assignment, served: CompletedRequest | None = None) -> None:
        """The request left the endpoint: served, or for a reason that is not the endpoint's fault."""
        ...

    def failed(self, assignment: Assignment, kind: FailureKind) -> None:
        """The endpoint did not serve the request."""
        ...

    def withdrawn(self, assignment: Assignment) -> None:
        """The request was never sent: its client has left meanwhile."""
        ...

    def record_outcome(self, outcome: RequestOutcome) -> None:
        """A client request is over, with all its engine requests."""
        ...
