"""The interfaces between a worker and the control process, other than decisions and limits. All values are plain.

A worker (`worker.Worker`) has the connections of clients and engines, and the control process
(`control_process.ControlProcess`) everything that exists once in a gateway. In a gateway of one process they call each
other directly, otherwise through `ipc`. Decisions are in `pagemill_routing.brain.interface`, limits in `limits.store`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagemill_protocol.metrics import Samples
from pagemill_servers.keys.caller import Caller


class PlotPoint(NamedTuple):
    """The load of all deployments at one moment."""

    number: int
    unix_s: float
    loads: bytes
    """JSON: the load of each deployment by its key (`ui.history`)."""


class WhatIf(NamedTuple):
    """A question for predicted latencies; `None`: as it was measured."""

    deployment: str
    """Namespace and name, with a slash between them."""
    replicas: int | None = None
    requests_per_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that are found in the prefix cache."""
    output_tokens: int | None = None
    percentile: float = 95.0
    """The percentage of the requests that the latencies are predicted for."""


class GatewayStatus(NamedTuple):
    """The state of the gateway as a whole."""

    ready: bool
    """Whether the gateway accepts requests and has a catalogue."""
    draining: bool
    detail: str
    """The cause for status messages, if something is missing or out of date; otherwise empty."""
    started_unix_s: int


class WorkerMeasurements(NamedTuple):
    """The measurements of one worker since its start."""

    samples: Samples
    num_requests: int
    """The number of requests in progress."""
    tenants: frozenset[str] = frozenset()
    """The tenants of all keys."""


class ControlProcessPort(Protocol):
    """Calls of workers."""

    async def status(self) -> GatewayStatus: ...

    async def fleet(self) -> bytes:
        """Return the state of all engines and queues as JSON (`ui.fleet`)."""
        ...

    async def samples(self, after: int) -> list[PlotPoint]:
        """Return the samples of the last quarter of an hour whose numbers are above `after` (`ui.history`)."""
        ...

    async def decisions(self, limit: int) -> bytes:
        """Return the latest routing decisions as JSON, newest first."""
        ...

    async def scaling(self, limit: int) -> bytes:
        """Return the operator's latest scaling decisions as JSON, newest first (`ui.scaling`)."""
        ...

    async def what_if(self, question: WhatIf) -> bytes:
        """Return predicted latencies as JSON (`ui.what_if`). Raises `PagemillError` 400 or 404."""
        ...

    async def bundle(self, digest: str) -> bytes:
        """Return the tokenizer bundle with this digest. Raises `PagemillError` 503 if no engine has it."""
        ...

    async def keep_response(self, account: str, response_id: str, value: bytes) -> None:
        """Store a response, like `stored_responses.store.ResponseStore.keep`."""
        ...

    async def kept_response(self, account: str, response_id: str) -> bytes | None:
        """Return a stored response, like `ResponseStore.get`."""
        ...

    async def forget_response(self, account: str, response_id: str) -> bool:
        """Remove a stored response, like `ResponseStore.remove`."""
        ...


class WorkerPort(Protocol):
    """Calls of the control process."""

    async def measure(self) -> WorkerMeasurements:
        """Return the worker's measurements, and drop the series of tenants that are gone.

        It never raises: for a worker that does not answer, it returns the last measurements.
        """
        ...

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        """Load the bundles that are in use; `templates` replace their own chat templates. `whole`: drop all others."""
        ...

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        """Replace the API keys that are accepted besides those of the settings and the file."""
        ...

    def refuse_contents(self, contents: frozenset[bytes]) -> None:
        """Refuse requests with these contents, and no others, because they crash engines."""
        ...


class LocalWorkerPort(WorkerPort, Protocol):
    """A worker in its own process."""

    @property
    def num_measured(self) -> int:
        """A counter that increases with every measurement."""
        ...

    def measures(self) -> WorkerMeasurements:
        """Return the worker's measurements."""
        ...
