"""The interface of the engines in a simulated fleet's pods, as the fleet and its relay use it.

`exact_engines` schedule every step with the real scheduler; `fast_engines` decide on counters. Both report to the
gateway's real brain in frames, and deliver the tokens that they have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pagemill_protocol.report.state import EngineLoad, StateFrame
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_routing.brain.interface import HashScheme


class TokenDelivery(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request."""

    request_id: str
    token_ids: Sequence[int]
    num_cached_tokens: int
    is_last: bool
    error: str = ""


Observe = Callable[[StateFrame], None]
"""Called when a frame reaches the gateway."""
Deliver = Callable[[Sequence[TokenDelivery]], None]
"""Called when tokens reach the gateway."""


class SimulatedEngine(Protocol):
    """One start of a pod."""

    @property
    def is_up(self) -> bool: ...

    @property
    def weights_digest(self) -> str: ...

    @property
    def load(self) -> EngineLoad:
        """The load that was reported last, or would be."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far, of all requests."""
        ...

    @property
    def num_adapter_loads(self) -> int:
        """Number of adapter loads begun so far."""
        ...

    def snapshot(self) -> StateFrame:
        """Return the first frame."""
        ...

    def enter(self, request: GenerateRequest, session: int | None) -> None:
        """Receive a request at the pod. Raise `PagemillError` if the engine refuses it."""
        ...

    def drain(self) -> None:
        """Report draining from the next frame on."""
        ...

    def stop(self) -> None:
        """Produce nothing more; what is on its way still arrives."""
        ...

    def check(self) -> None:
        """Raise if the engine's state is inconsistent."""
        ...


class EngineKind(Protocol):
    is_exact: bool
    vocab_size: int

    def start(self, pod_name: str, observe: Observe, deliver: Deliver, start_s: dict[str, float]) -> SimulatedEngine:
        """Start the engine of a pod. It reports `start_s`, the seconds of each phase of its start."""
        ...

    def prefix_chunks(
        self, prompt: Sequence[int], session: int | None, scheme: HashScheme, adapter_digest: str
    ) -> tuple[bytes, ...]:
        """Return the names that the engines give to the prompt's full prefix chunks."""
        ...
