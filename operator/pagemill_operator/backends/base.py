"""The interface of everything that can carry plans out. Neighbours: `plan` makes them, `status` explains the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagemill_operator.plan.types import Plan
from pagemill_operator.status.conditions import Observation


class BackendError(Exception):
    """The backend cannot work at all; the message names the remedy."""


@dataclass(frozen=True)
class Event:
    """Something that people want to read while they wait."""

    subject: str
    """The process it is about, such as `smollm2-0` or `gateway`."""
    message: str
    since_start_s: float
    """Seconds since that process started."""
    warning: bool = False


class Cluster(Protocol):
    async def apply(self, plans: Sequence[Plan]) -> None:
        """Want exactly these deployments, oldest first. Returns at once; `observe` tells how far it is."""

    def observe(self, key: str) -> Observation:
        """What is known of the deployment `namespace/name`. Raises `KeyError` for one that is not wanted."""

    async def stop(self) -> None:
        """End everything that was started, and leave nothing behind."""
