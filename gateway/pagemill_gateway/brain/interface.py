"""What a relay may ask of the brain: four calls and the two values they pass.

Kept narrow because relay and brain need not live in one process: `find` and `choose` are questions with an answer,
the others are messages that nobody waits for.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

FailureKind = Literal["refused", "declined", "unreachable", "broken", "request"]
"""`refused`: the engine works but is full. `declined`: it is shutting down or starting and takes nothing.
`unreachable`: nobody listens there. `broken`: it crashed, is silent, or sent garbage. `request`: the engine works but
failed this one request."""


class HashScheme(NamedTuple):
    """What the block hashes of a deployment's engines depend on, besides token ids and salt."""

    weights_digest: str
    kv_dtype: str
    block_size: int
    granule_blocks: int

    @property
    def granule_tokens(self) -> int:
        return self.block_size * self.granule_blocks


class Ask(NamedTuple):
    """What routing may know of one engine request. No text and no token of it."""

    num_prompt_tokens: int
    granules: tuple[bytes, ...] = ()
    """Hashes of the prompt's full granules under the target's scheme and the caller's salt."""
    granule_tokens: int = 0
    prompt_key: bytes = b""
    """Hash of the prompt's first characters."""
    session: bytes = b""
    """Hash of the session that the client named; empty: none."""


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
    session_header: str = ""
    """Lower case; empty: the deployment has none."""


class Choice(NamedTuple):
    """One decision: accounted from the moment it is made until `finished` or `failed` gets it back."""

    decision: int
    endpoint_id: str
    data_url: str
    token: str
    policy: str = ""
    believed: bool = False
    """The endpoint's own report was weighed, not just our counts."""
    predicted_cached_tokens: int = 0
    granule_tokens: int = 0
    """What the engine finds beyond the prediction and below this much more, no report could have told."""
    predicted_ttft_ms: float | None = None
    """From the decision to the first token; `None`: the policy did not predict any."""


class Brain(Protocol):
    def resolve(self, model: str) -> Target:
        """The deployment that takes a request for the name or alias `model`.

        Raises `PagemillError`: 404 for an unknown name, 503 with the reason when no engine is ready yet.
        """
        ...

    async def find(self, model: str) -> Target:
        """As `resolve`, but a deployment that lost its last engine a moment ago is given time to get one back."""
        ...

    async def choose(self, target: Target, tried: frozenset[str], ask: Ask) -> Choice:
        """An endpoint, preferring those not in `tried`. Raises `PagemillError` 503 when there is none at all."""
        ...

    def started(self, choice: Choice) -> None:
        """The engine accepted the request and its first frame arrived."""
        ...

    def alive(self, choice: Choice) -> bool:
        """Whether the engine still reports its state: it is busy then, not gone, however long it says nothing."""
        ...

    def finished(self, choice: Choice, num_output_tokens: int | None = None) -> None:
        """The request left the endpoint, for whatever reason that is no fault of the endpoint's.

        `num_output_tokens`: of an answer that came to its end.
        """
        ...

    def failed(self, choice: Choice, kind: FailureKind) -> None:
        """The endpoint did not serve the request."""
        ...
