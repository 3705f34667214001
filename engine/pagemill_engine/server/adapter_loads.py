"""Asks the engine process to read adapters, and receives what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pagemill_engine.ipc.messages import AdapterRead, ForgetAdapter, LoadAdapter, ToEngine
from pagemill_models.adapters.errors import AdapterError


class AdapterLoads:
    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        """`send`: sends a message to the engine process, which must be ready."""
        self._send = send
        self._asked: dict[int, asyncio.Future[AdapterRead]] = {}
        self._num_asked = 0

    async def load(self, path: Path, *, pinned: bool = False) -> AdapterRead:
        """Return the digest by which requests may ask for the adapter from now on. Raises `AdapterError`."""
        self._num_asked += 1
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(LoadAdapter(number, str(path), pinned))
        read: AdapterRead = await answer
        if not read.digest:
            raise AdapterError(read.reason, read.message)
        return read

    def forget(self, digest: str) -> None:
        """Accept no further requests for an adapter; running ones end well."""
        self._send(ForgetAdapter(digest))

    def answered(self, read: AdapterRead) -> None:
        """Receive the engine process's answer."""
        answer = self._asked.pop(read.number)
        if not answer.done():
            answer.set_result(read)
