"""What a worker and the brain's process ask and tell each other, besides decisions and limits. Plain values only.

A worker (`worker.Worker`) holds the connections of clients and engines, the head (`control_process.Head`) everything
that there is once in a gateway. In a gateway of one process they call each other, else `ipc` stands between them.
Decisions are `brain.interface`'s, limits `limits.store`'s.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagemill_protocol.keys.caller import Caller
from pagemill_protocol.metrics import Samples


class GatewayStatus(NamedTuple):
    """How the gateway as a whole is."""

    ready: bool
    """It takes requests and knows whom to ask."""
    draining: bool
    detail: str
    """What is out of order, for people."""
    started_unix_s: int


class WorkerMeasurements(NamedTuple):
    """What one worker has measured since it was started."""

    samples: Samples
    num_requests: int
    """Inside it now."""


class ControlProcessPort(Protocol):
    """What workers ask."""

    async def status(self) -> GatewayStatus: ...

    async def bundle(self, digest: str) -> bytes:
        """The tokenizer bundle of this digest. Raises `PagemillError` 503 when no engine has it any more."""
        ...


class WorkerPort(Protocol):
    """What the head asks and tells."""

    async def measure(self, endpoint_ids: frozenset[str]) -> WorkerMeasurements:
        """Only these endpoints are of interest any more. Never fails: who cannot be asked is as it was before."""
        ...

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        """These bundles are in use, and these chat templates in place of their own; no others, if that is `whole`."""
        ...

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        """These keys, and no others, are accepted besides those of settings and file."""
        ...


class LocalWorkerPort(WorkerPort, Protocol):
    """A worker in its own process."""

    @property
    def num_measured(self) -> int:
        """Grows with whatever is measured."""
        ...

    def measures(self) -> WorkerMeasurements:
        """What `measure` would say."""
        ...
