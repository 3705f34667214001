"""What runs in the pods of a simulated fleet, as the fleet and its relay see it.

One kind schedules every step with the real scheduler (`exact_engines`), the other one decides on counters
(`fast_engines`). Both report themselves to the gateway's real brain in frames, and deliver what they have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pagemill_gateway.brain.interface import HashScheme
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.state import EngineLoad, StateFrame


class Delivery(NamedTuple):
    """What one request has got."""

    request_id: str
    token_ids: Sequence[int]
    num_cached_tokens: int
    is_last: bool
    error: str = ""


Observe = Callable[[StateFrame], None]
"""A frame is at the gateway."""
Deliver = Callable[[Sequence[Delivery]], None]
"""Tokens are at the gateway."""


class Engine(Protocol):
    """One start of a pod."""

    @property
    def is_up(self) -> bool: ...

    @property
    def weights_digest(self) -> str: ...

    @property
    def load(self) -> EngineLoad:
        """As it was reported last, or would be."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Made so far, of all requests."""
        ...

    def snapshot(self) -> StateFrame:
        """Its first frame."""
        ...

    def enter(self, request: GenerateRequest, session: int | None) -> None:
        """The request is at the pod. Raises `PagemillError`: the engine refuses it."""
        ...

    def drain(self) -> None:
        """From the next frame on it says that it wants to go."""
        ...

    def stop(self) -> None:
        """From now on nothing comes of it; what is on its way arrives."""
        ...

    def check(self) -> None:
        """Raises where its bookkeeping is inconsistent."""
        ...


class EngineKind(Protocol):
    is_exact: bool
    vocab_size: int

    def start(self, pod_name: str, observe: Observe, deliver: Deliver) -> Engine: ...

    def prefix_chunks(self, prompt: Sequence[int], session: int | None, scheme: HashScheme) -> tuple[bytes, ...]:
        """What its engines call the prompt's full prefix chunks."""
        ...
