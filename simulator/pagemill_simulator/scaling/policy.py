"""The measurements of a simulated fleet for scaling, and the interface of a scaler.

A fleet measures its pods directly (`FleetSnapshot.pods`), as other platforms scrape them, and has the signals of the
load stream, which Pagemill's own policies get. `simulated` runs any scaling policy of the operator's protocol
(`pagemill_operator.autoscaler.policy`) as a `FleetScaler`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.state import EngineLoad


class PodSnapshot(NamedTuple):
    """One ordered pod that is neither gone nor draining."""

    name: str
    is_ready: bool
    load: EngineLoad = EngineLoad()
    """The present load of its engine."""


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment at one instant."""

    at_s: float
    wanted: int
    """Replicas that were ordered last."""
    pods: tuple[PodSnapshot, ...]
    num_held: int
    """Requests that wait in the gateway, for capacity or for the first pod."""
    num_arrived: int
    """Requests since the beginning."""
    num_prompt_tokens_arrived: int
    num_output_tokens_made: int
    num_on_leaving: int = 0
    """Requests that draining pods still run."""
    signals: Signals
    """The signals that the operator's autoscaler would get now."""

    @property
    def ready(self) -> int:
        return sum(pod.is_ready for pod in self.pods)

    @property
    def concurrency(self) -> int:
        """Number of requests anywhere in the system."""
        return self.num_held + self.num_on_leaving + sum(pod.load.num_requests for pod in self.pods)


class ReplicaBounds(NamedTuple):
    """The user's bounds, the same for every policy."""

    min_replicas: int
    max_replicas: int


class FleetScaler(Protocol):
    """A scaler of one fleet, with its memory."""

    @property
    def name(self) -> str: ...

    @property
    def interval_s(self) -> float:
        """Seconds between two decisions."""
        ...

    @property
    def wakes_at_once(self) -> bool:
        """Whether it is asked at once when a request finds no pod, not even a starting one."""
        ...

    def decide(self, seen: FleetSnapshot) -> int:
        """Return the new number of replicas; the caller clamps it to the bounds."""
        ...
