"""The interface of the backends that carry plans out.

`plan` makes the plans; `status` explains the observations.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from pagemill_operator.status.observation import Observation

FORMER_NAME_S = 600.0
"""Seconds for which the name before a change of a model's name is served, and longer while replicas are replaced."""


class BackendError(Exception):
    """An error that keeps the whole backend from working; its message names the remedy."""


@dataclass(frozen=True)
class Event:
    """A message about a process for users who wait for it."""

    subject: str
    """The name of the process, such as `smollm2-0` or `gateway`."""
    message: str
    since_start_s: float
    """Seconds since that process started."""
    warning: bool = False


class Cluster(Protocol):
    """A backend that runs plans as processes on this machine or as pods, and reports observations of them.

    How plans come in differs: the local backend gets all of them at once, the Kubernetes backend one at a time.
    """

    async def forget(self, keys: Collection[str]) -> None:
        """Stop carrying out these deployments (`namespace/name`)."""

    def observe(self, key: str) -> Observation:
        """Return what is known of the deployment `namespace/name`. Raise `KeyError` if it is not carried out."""
