"""The operations on files and batches, without HTTP. An account sees only its own objects, and has limits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from pagemill_api.openai.batches import BatchRequest
from pagemill_gateway.batches.lines import scan_lines
from pagemill_gateway.batches.objects import FINAL, Batch, BatchFile, is_object_id, new_object_id
from pagemill_gateway.batches.store import BatchStore
from pagemill_gateway.config import BatchesConfig
from pagemill_protocol.errors import PagemillError, body_too_large, invalid_field, show
from pagemill_servers.keys.caller import Caller

MAX_OLD_BATCHES = 1000
"""Limit for the finished batches of an account; older ones are deleted."""
PIECE_BYTES = 256 * 1024
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400


class Batches:
    def __init__(self, config: BatchesConfig, store: BatchStore) -> None:
        self._config = config
        self._store = store
        self._uploads: dict[str, set[Upload]] = {}
        """The uploads of each account that are under way here."""
        self._creating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def upload(self, account: str) -> Upload:
        """Begin an upload, which the caller must end by `done` or `discard`.

        Raises `PagemillError` if the account has the maximum number of files or of their bytes.
        """
        files = await self.files(account)
        others = self._uploads.setdefault(account, set())
        self._check_space(len(files) + len(others), sum(each.bytes for each in files))
        upload = Upload(self._config, self._store, account, sum(each.bytes for each in files), others)
        others.add(upload)
        return upload

    def _check_space(self, num_files: int, num_bytes: int) -> None:
        """Raise `PagemillError` if the account has no space for another file."""
        config = self._config
        if num_files >= config.max_files:
            raise PagemillError(
                f"There are {num_files} files already; {config.max_files} are allowed (the gateway's setting "
                "batches.max_files). Delete some.",
                code="too_many_files",
            )
        if num_bytes > config.max_tenant_bytes:
            raise too_many_bytes(config)

    async def files(self, account: str) -> list[BatchFile]:
        found = await self._store.all("files", account)
        return [msgspec.json.decode(raw, type=BatchFile) for raw in found.values()]

    async def file(self, account: str, file_id: str, param: str | None = None) -> BatchFile:
        raw = await self._store.get("files", account, file_id) if is_object_id(file_id) else None
        if raw is None:
            raise _not_found("file", file_id, param)
        return msgspec.json.decode(raw, type=BatchFile)

    async def content(self, file: BatchFile) -> AsyncIterator[bytes]:
        offset = 0
        while piece := await self._store.read(file.id, offset, min(PIECE_BYTES, file.bytes - offset)):
            yield piece
            offset += len(piece)
            if offset >= file.bytes:
                return

    async def delete_file(self, account: str, file_id: str) -> None:
        """Delete a file. Raises `PagemillError` 409 while a batch that is not over needs it."""
        file = await self.file(account, file_id)
        user = next((each for each in await self.batches(account) if self._uses(each, file_id)), None)
        if user is not None:
            remedy = "Wait for its end." if user.status == "cancelling" else "Wait for its end, or cancel it."
            raise PagemillError(
                f"The batch {user.id} is {user.status} and needs the file {file_id}. {remedy}",
                status=409,
                code="file_in_use",
            )
        await self._store.remove("files", account, file.id)
        await self._store.remove_content(file.id)

    @staticmethod
    def _uses(batch: Batch, file_id: str) -> bool:
        return batch.status not in FINAL and file_id == batch.input_file_id

    async def create(self, caller: Caller, request: BatchRequest) -> Batch:
        window_s = _window_s(request.completion_window)
        lock = self._creating.setdefault(caller.account, asyncio.Lock())
        async with lock:
            return await self._create(caller, request, window_s)

    async def _create(self, caller: Caller, request: BatchRequest, window_s: int) -> Batch:
        await self.file(caller.account, request.input_file_id, "input_file_id")
        await self._make_place(caller.account)
        files = await self.files(caller.account)
        self._check_space(len(files), sum(each.bytes for each in files))
        now = int(time.time())
        batch = Batch(
            id=new_object_id("batch_"),
            account=caller.account,
            key_hash=caller.key_hash,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            output_file_id=new_object_id("file-"),
            error_file_id=new_object_id("file-"),
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=request.metadata,
        )
        # In this order, so that a batch that clients can see is always run.
        await self._store.put("open", "", batch.id, caller.account.encode())
        await self._store.put("batches", caller.account, batch.id, msgspec.json.encode(batch))
        if await self._store.get("files", caller.account, batch.input_file_id) is None:  # deleted meanwhile
            await self._store.remove("open", "", batch.id)
            await self._store.remove("batches", caller.account, batch.id)
            raise _not_found("file", batch.input_file_id, "input_file_id")
        return batch

    async def batches(self, account: str) -> list[Batch]:
        found, cancels = await self._store.all("batches", account), await self._store.all("cancels", account)
        return [_as_seen(raw, cancelled=batch_id in cancels) for batch_id, raw in found.items()]

    async def batch(self, account: str, batch_id: str) -> Batch:
        raw = await self._store.get("batches", account, batch_id) if is_object_id(batch_id) else None
        if raw is None:
            raise _not_found("batch", batch_id, None)
        return _as_seen(raw, cancelled=await self._store.get("cancels", account, batch_id) is not None)

    async def cancel(self, account: str, batch_id: str) -> Batch:
        batch = await self.batch(account, batch_id)
        if batch.status in FINAL:
            raise PagemillError(
                f"The batch is {batch.status} already and cannot be cancelled.", status=409, code="batch_is_over"
            )
        for owner in (account, ""):
            await self._store.put("cancels", owner, batch_id, b"%d" % int(time.time()))
        batch = await self.batch(account, batch_id)
        if batch.status in FINAL:  # it ended in the same moment, and no process will remove these
            for owner in (account, ""):
                await self._store.remove("cancels", owner, batch_id)
        return batch

    async def result_lines(self, batch: Batch, keep_bytes: int, *, only_errors: bool = False) -> AsyncIterator[bytes]:
        """Yield the first `keep_bytes` of each line of the batch's output and error files."""
        for file_id, is_there in ((batch.output_file_id, not only_errors), (batch.error_file_id, True)):
            if is_there:
                async for line in scan_lines(partial(self._store.read, file_id), keep_bytes):
                    yield line.beginning

    async def delete(self, account: str, batch: Batch) -> None:
        """Delete a batch that is over, with its files. Raises `PagemillError` 409 for others."""
        if batch.status not in FINAL:
            raise PagemillError(
                f"The batch is {batch.status}. Wait for its end, or cancel it, before you delete it.",
                status=409,
                code="batch_is_not_over",
            )
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            await self._store.remove("files", account, file_id)
            await self._store.remove_content(file_id)
        await self._store.remove("batches", account, batch.id)

    async def _make_place(self, account: str) -> None:
        batches = await self.batches(account)
        over = [each for each in batches if each.status in FINAL]
        if len(batches) - len(over) >= self._config.max_batches:
            raise PagemillError(
                f"{self._config.max_batches} batches are not over yet, and no more are allowed (the gateway's setting "
                "batches.max_batches). Wait, or cancel some.",
                status=429,
                type="requests",
                code="too_many_batches",
            )
        for each in over[: max(0, len(over) - MAX_OLD_BATCHES + 1)]:
            await self._store.remove("batches", account, each.id)


class Upload:
    """A file that is being uploaded; call `done` at its end, or `discard` if the upload fails."""

    def __init__(
        self, config: BatchesConfig, store: BatchStore, account: str, num_bytes_before: int, others: set[Upload]
    ) -> None:
        """`others` has all uploads of the account that are under way."""
        self._others = others
        self._config = config
        self._store = store
        self._account = account
        self._num_bytes_before = num_bytes_before
        self.num_bytes = 0
        self._id = new_object_id("file-")

    async def append(self, data: bytes) -> None:
        """Append data. Raises `PagemillError` 413 if the file or all files of the account become too large."""
        self.num_bytes += len(data)
        if self.num_bytes > self._config.max_file_bytes:
            raise body_too_large(self._config.max_file_bytes)
        if self._num_bytes_before + sum(each.num_bytes for each in self._others) > self._config.max_tenant_bytes:
            raise too_many_bytes(self._config)
        await self._store.append(self._id, data)

    async def done(self, filename: str, purpose: str) -> BatchFile:
        file = BatchFile(
            id=self._id, bytes=self.num_bytes, created_at=int(time.time()), filename=filename[:200], purpose=purpose
        )
        await self._store.put("files", self._account, file.id, msgspec.json.encode(file))
        self._others.discard(self)
        return file

    async def discard(self) -> None:
        self._others.discard(self)
        await self._store.remove_content(self._id)


def too_many_bytes(config: BatchesConfig) -> PagemillError:
    return PagemillError(
        f"All files together would exceed {config.max_tenant_bytes} bytes (the gateway's setting "
        "batches.max_tenant_bytes). Delete some.",
        status=413,
        code="too_many_file_bytes",
    )


def _as_seen(raw: bytes, *, cancelled: bool) -> Batch:
    batch = msgspec.json.decode(raw, type=Batch)
    if cancelled and batch.status not in FINAL:
        batch.became("cancelling")
    return batch


def _window_s(window: str) -> int:
    given = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    seconds = int(given[1]) * _UNITS[given[2]] if given else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise invalid_field(
            "completion_window",
            f"`completion_window` must be a time like 24h, 30m or 7d of at most 30 days, got {show(window)}.",
        )
    return seconds


def _not_found(what: str, object_id: str, param: str | None) -> PagemillError:
    return PagemillError(f"No such {what}: {show(object_id)}.", status=404, param=param, code=f"{what}_not_found")
