"""The calls between a worker and the control process, besides decisions and limits. Plain values only.

A worker (`worker.Worker`) holds the connections of clients and engines, the control process
(`control_process.ControlProcess`) everything that exists once in a gateway. In a gateway of one process they call each
other directly, otherwise through `ipc`. Decisions are in `brain.interface`, limits in `limits.store`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagemill_protocol.keys.caller import Caller
from pagemill_protocol.metrics import Samples


class GatewayStatus(NamedTuple):
    """The state of the gateway as a whole."""

    ready: bool
    """It takes requests and has a catalogue."""
    draining: bool
    detail: str
    """What is out of date or missing, for people."""
    started_unix_s: int


class WorkerMeasurements(NamedTuple):
    """What one worker has measured since it was started."""

    samples: Samples
    num_requests: int
    """In progress now."""


class ControlProcessPort(Protocol):
    """Calls of workers."""

    async def status(self) -> GatewayStatus: ...

    async def bundle(self, digest: str) -> bytes:
        """The tokenizer bundle of this digest. Raises `PagemillError` 503 when no engine has it any more."""
        ...

    async def keep_response(self, account: str, response_id: str, value: bytes) -> None:
        """As `stored_responses.store.ResponseStore.keep`."""
        ...

    async def kept_response(self, account: str, response_id: str) -> bytes | None:
        """As `ResponseStore.get`."""
        ...

    async def forget_response(self, account: str, response_id: str) -> bool:
        """As `ResponseStore.remove`."""
        ...


class WorkerPort(Protocol):
    """Calls of the control process."""

    async def measure(self, endpoint_ids: frozenset[str]) -> WorkerMeasurements:
        """Series of other endpoints are dropped. Never fails: a worker that does not answer keeps its last
        measurements.
        """
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
        """Increases with every measurement."""
        ...

    def measures(self) -> WorkerMeasurements:
        """The result of `measure`."""
        ...
