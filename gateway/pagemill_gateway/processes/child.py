"""Both ends of the interface between the supervisor and its child processes: setup, readiness and heartbeats.

The child gets its setup on standard input, which stays open: when it is closed, the supervisor is gone, and the child
exits. On standard output the child writes one line when it serves, and empty lines as heartbeats of its event loop. A
child without heartbeats hangs and is replaced. Logs go to standard error, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from pagemill_gateway.config import GatewayConfig

Role = Literal["control", "worker"]
READY = b"ready\n"
BEAT = b"\n"
HEARTBEAT_INTERVAL_S = 0.5
SIZE_BYTES = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    name: str
    """The process's name in log lines."""
    config: GatewayConfig
    folder: str
    """The gateway's private folder with the control process's socket and its catalogue for the next one."""
    listener: int
    """The descriptor of the process's listening socket, for the control port or the data port."""
    restarts: int = 0
    """How often the process was replaced before."""

    @property
    def control_socket(self) -> Path:
        return Path(self.folder, "control.sock")

    @property
    def catalog_file(self) -> Path:
        return Path(self.folder, "catalog.json")

    def listening_socket(self) -> socket.socket:
        return socket.socket(fileno=self.listener)


def encode_setup(setup: Setup) -> bytes:
    data = msgspec.json.encode(setup)
    return len(data).to_bytes(SIZE_BYTES, "big") + data


def read_setup() -> Setup:
    """Read the setup from standard input; from then on, this process exits when standard input is closed."""
    size = int.from_bytes(_read(SIZE_BYTES), "big")
    setup = msgspec.json.decode(_read(size), type=Setup)
    threading.Thread(target=_end_with_parent, args=(setup.folder,), name="parent", daemon=True).start()
    return setup


def report_ready() -> None:
    os.write(sys.stdout.fileno(), READY)


async def send_heartbeats() -> None:
    """Send heartbeats while the event loop runs."""
    os.set_blocking(sys.stdout.fileno(), False)
    while True:
        with suppress(BlockingIOError):  # the pipe is full, if the supervisor has not read for about an hour
            os.write(sys.stdout.fileno(), BEAT)
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)


def end_at_once_when_asked() -> None:
    """Exit at once on SIGTERM, because there is nothing to drain before the process serves."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(sys.stdin.fileno(), size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def _end_with_parent(folder: str) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
