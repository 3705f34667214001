"""The head's socket, to which its workers connect."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagemill_gateway.head import Head
from pagemill_gateway.ipc.worker_line import WorkerLine


@asynccontextmanager
async def serving_workers(head: Head, path: Path) -> AsyncIterator[None]:
    """While the block runs. Who may open the folder of `path` may connect."""
    loop = asyncio.get_running_loop()
    workers: list[WorkerLine] = []

    def new_line() -> asyncio.BaseProtocol:
        workers[:] = [each for each in workers if not each.line.lost]
        workers.append(worker := WorkerLine(head))
        return worker.line

    server = await loop.create_unix_server(new_line, sock=_bound(path))
    try:
        yield
    finally:
        server.close()
        await asyncio.gather(*(each.line.close() for each in workers if not each.line.lost))


def _bound(path: Path) -> socket.socket:
    """In place of one that a process before left there."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener
