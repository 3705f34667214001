"""What keeps files and batches: small records by kind, account and id, and the contents of files.

`directory` keeps them in a folder, `redis` where several gateways reach them. Who runs a batch holds its lease; what it
writes with a lease that it has lost is refused.
"""

from __future__ import annotations

from typing import Literal, Protocol

Kind = Literal["files", "batches", "open", "cancels"]
"""`open`: the account of each batch that is not over, under the account ""; `cancels`: batches to be cancelled."""


class LeaseLost(Exception):
    """Another gateway may run the batch now."""


class Lease(Protocol):
    async def renew(self) -> None:
        """Raises `LeaseLost`."""
        ...

    async def release(self) -> None: ...


class BatchStore(Protocol):
    """Every method raises `PagemillError` 503 while the store cannot be used."""

    async def put(self, kind: Kind, account: str, object_id: str, value: bytes, lease: Lease | None = None) -> None:
        """Raises `LeaseLost`."""
        ...

    async def get(self, kind: Kind, account: str, object_id: str) -> bytes | None: ...

    async def all(self, kind: Kind, account: str) -> dict[str, bytes]:
        """By id, oldest first."""
        ...

    async def remove(self, kind: Kind, account: str, object_id: str) -> bool:
        """Whether it was there."""
        ...

    async def append(self, file_id: str, data: bytes, lease: Lease | None = None) -> None:
        """To the file's content; makes it. Raises `LeaseLost`."""
        ...

    async def read(self, file_id: str, offset: int, size: int) -> bytes:
        """As far as there is content."""
        ...

    async def remove_content(self, file_id: str) -> None: ...

    async def trim(self, file_id: str) -> None:
        """Remove an unfinished last line."""
        ...

    async def lease(self, batch_id: str) -> Lease | None:
        """`None`: another one holds it."""
        ...

    async def close(self) -> None: ...
