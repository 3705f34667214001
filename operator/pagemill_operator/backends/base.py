"""The interface of everything that can carry plans out. Neighbours: `plan` makes them, `status` explains the result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from pagemill_operator.status.observation import Observation


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
    """Processes on this machine, or pods. Both carry out the same plans and answer with the same observations.

    How plans come in differs: a machine gets all of them at once, a cluster one at a time, for ever.
    """

    async def forget(self, keys: Collection[str]) -> None:
        """Want these deployments (`namespace/name`) no longer."""

    def observe(self, key: str) -> Observation:
        """What is known of the deployment `namespace/name`. Raises `KeyError` for one that is not wanted."""
