"""The interface of stores for files and batches: small records by kind, account and id, and the contents of files.

`directory` stores them in a folder, and `redis` for several gateways. The process that runs a batch holds its lease;
writes with a lost lease are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, Protocol, TypeVar

from pagemill_protocol.errors import PagemillError, unavailable

Kind = Literal["files", "batches", "open", "cancels", "running"]
"""`open` has the account of each unfinished batch, under the account "". `cancels` has the batches to be cancelled, by
account, and all of them under the account "", for those who run them. `running` has the running lines of a batch."""
Result = TypeVar("Result")


class LeaseLost(Exception):
    """Another gateway may run the batch now."""


class Lease(Protocol):
    async def renew(self) -> None:
        """Extend the lease. Raises `LeaseLost`."""
        ...

    async def release(self) -> None: ...


class BatchStore(Protocol):
    """A store. Every method raises `PagemillError` 503 while the store is unavailable."""

    max_content_bytes: int
    """The largest content of a file."""
    scratch_directory: str | None
    """The directory for unnamed files; `None` for that of this machine's temporary files."""

    async def put(self, kind: Kind, account: str, object_id: str, value: bytes, lease: Lease | None = None) -> None:
        """Write a record. Raises `LeaseLost`."""
        ...

    async def get(self, kind: Kind, account: str, object_id: str) -> bytes | None: ...

    async def all(self, kind: Kind, account: str) -> dict[str, bytes]:
        """Return all records by id, oldest first."""
        ...

    async def remove(self, kind: Kind, account: str, object_id: str) -> bool:
        """Remove a record. Return whether there was one."""
        ...

    async def append(self, file_id: str, data: bytes, lease: Lease | None = None) -> None:
        """Append to the content of a file, and create it if needed. Raises `LeaseLost`."""
        ...

    async def read(self, file_id: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of content; nothing at the end."""
        ...

    async def remove_content(self, file_id: str) -> None: ...

    async def trim(self, file_id: str) -> None:
        """Remove an unfinished last line."""
        ...

    async def lease(self, batch_id: str) -> Lease | None:
        """Take the lease of a batch; `None` if another process holds it."""
        ...

    async def close(self) -> None: ...


def store_failure(error: OSError) -> PagemillError:
    return unavailable(
        f"The directory of files and batches cannot be used: {error.strerror}.", code="store_unavailable"
    )


async def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work, which goes on to its end even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # read, so that it is not reported as lost
        raise
