"""How ranks on several nodes find each other: node 0 listens, each rank joins it and gets the addresses of the others.

Every connection is authenticated (`kernels.ranks.connections`) and begins with its purpose. `nodes` loads a model on
ranks that have joined.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from pagemill_execution.config import MOST_RANKS, NodesConfig
from pagemill_execution.runners.ranks.identity import RankIdentity
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.ranks.connections import (
    HANDSHAKE_SECONDS,
    ConnectionRefused,
    accepted,
    listening,
    opened,
    receive_frame,
    send_frame,
)

logger = logging.getLogger(__name__)

_RETRY_SECONDS, _NOTE_SECONDS = 0.2, 10.0
RESOLVE_SECONDS = 30.0
"""How long a name that does not resolve is asked for, since it is nearly always misspelt. In a group of pods, whose
names appear with their Service, it is asked for as long as nodes wait for each other."""
_THREADS = 16
Purpose = Literal["join", "plans", "values"]
Key = tuple[Purpose, int]


class Opening(msgspec.Struct):
    """The first message of a connection."""

    purpose: Purpose
    rank: int


class Joining(msgspec.Struct):
    """What a rank says of itself when it joins."""

    identity: RankIdentity
    node: int
    num_nodes: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    port: int
    """Where ranks with higher numbers find it."""
    memory: MemoryState
    """Of its node."""


class Member(NamedTuple):
    """A rank that has joined, as rank 0 sees it."""

    connection: socket.socket
    host: str
    joining: Joining


def token_of(nodes: NodesConfig) -> bytes:
    """Return the token that all ranks know. Raises `LoadError`."""
    token = nodes.token
    if not token and nodes.tokens_file is not None:
        try:
            with open(nodes.tokens_file, encoding="utf-8") as file:
                token = next((line.strip() for line in file if line.strip()), "")
        except (OSError, ValueError) as error:
            raise LoadError(
                "RendezvousFailed", f"The token file `{nodes.tokens_file}` cannot be read: {error}."
            ) from error
    if not token:
        raise LoadError(
            "RendezvousFailed",
            "Ranks on several nodes need a token that all of them know. Set PAGEMILL_INTERNAL_TOKEN or "
            "--internal-token-file to the same value on all nodes.",
        )
    return token.encode()


class Listener:
    """Accepts ranks until it is closed. Who does not know the token is closed without an answer."""

    def __init__(self, found: socket.socket, token: bytes) -> None:
        self._socket, self._token = found, token
        self.port: int = found.getsockname()[1]
        self._found: queue.Queue[tuple[Opening, socket.socket]] = queue.Queue()
        self._taken: list[socket.socket] = []
        self._pool, self._room = ThreadPoolExecutor(_THREADS, "rank-accept"), threading.BoundedSemaphore(MOST_RANKS * 2)
        threading.Thread(target=self._accept, name="rank-accept", daemon=True).start()

    def collect(
        self, wanted: Iterable[Key], deadline: float, check: Callable[[set[Key]], None]
    ) -> dict[Key, socket.socket]:
        """Return connections by purpose and rank; those that have not come at the deadline are missing. `check` is
        called with what is left, again and again while it is awaited."""
        left, found = set(wanted), dict[Key, socket.socket]()
        while left and time.monotonic() < deadline:
            check(left)
            try:
                opening, connection = self._found.get(timeout=_RETRY_SECONDS)
            except queue.Empty:
                continue
            key = opening.purpose, opening.rank
            if key in left:
                left.discard(key)
                found[key] = connection
                self._taken.append(connection)
            else:
                logger.warning("a second rank %d has come, or one that is not awaited; it is refused", opening.rank)
                connection.close()
        return found

    def abandon(self) -> None:
        """Close the connections that it has returned, too."""
        for connection in self._taken:
            connection.close()
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._pool.shutdown(cancel_futures=True)  # greetings are short
        while not self._found.empty():
            self._found.get()[1].close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                connection.close()  # more than all ranks: none of them is among these
                continue
            try:
                self._pool.submit(self._greet, connection)
            except RuntimeError:
                connection.close()
                return

    def _greet(self, connection: socket.socket) -> None:
        try:
            if not accepted(connection, self._token):
                return
            connection.settimeout(HANDSHAKE_SECONDS)
            opening = msgspec.json.decode(receive_frame(connection), type=Opening)
            connection.settimeout(None)
        except (OSError, EOFError, msgspec.DecodeError):
            connection.close()
            return
        finally:
            self._room.release()
        self._found.put((opening, connection))


def listen(nodes: NodesConfig, token: bytes, note: Callable[[str], None]) -> Listener:
    """Return the listener of node 0. Raises `LoadError`. `note`: is called with what it waits for."""
    return Listener(_until(nodes, lambda deadline: listening(nodes.address, nodes.port), note=note), token)


def open_to(
    purpose: Purpose, rank: int, nodes: NodesConfig, token: bytes, at: tuple[str, int] | None = None
) -> socket.socket:
    """Return a connection to rank 0, or to another rank `at` an address. Raises `LoadError`."""
    host, port = at or (nodes.address, nodes.port)
    connection = _until(nodes, lambda deadline: opened(host, port, token, deadline), at)
    send_frame(connection, msgspec.json.encode(Opening(purpose, rank)))
    return connection


def _until(
    nodes: NodesConfig,
    run: Callable[[float], socket.socket],
    at: tuple[str, int] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> socket.socket:
    """Return what `run` returns once it succeeds. Raises `LoadError` after the time in which nodes have to start, and
    of a name that does not resolve earlier. `note`: is called with what it waits for."""
    host, port = at or (nodes.address, nodes.port)
    began, noted = time.monotonic(), 0.0
    deadline = began + nodes.timeout_s
    while True:
        limit_s = nodes.timeout_s
        try:
            return run(deadline)
        except ConnectionRefused as error:
            raise LoadError("RendezvousFailed", f"{error}. Give all nodes the same internal token.") from error
        except (socket.gaierror, UnicodeError) as error:
            limit_s = nodes.timeout_s if nodes.of_group else min(nodes.timeout_s, RESOLVE_SECONDS)
            why = (
                f"The address `{host}` of node 0 does not resolve: {error}. Set --master-addr (nodes.address) "
                "to a name or an IP address of node 0 that all nodes know"
            )
        except OSError as error:
            why = f"{host}:{port} cannot be reached: {error.strerror or error}. " + (
                "Start node 0 (--node-rank 0), and let the network pass connections between the nodes"
                if nodes.rank or at
                else "Set --master-addr (nodes.address) to an address of this node, and --master-port to a free port"
            )
        now = time.monotonic()
        if now >= began + limit_s:
            raise LoadError("RendezvousFailed", f"{why}. It was tried for {limit_s:g} s.")
        if now >= noted:
            logger.warning("%s; it is tried for %.0f s more", why, began + limit_s - now)
            note(why)
            noted = now + _NOTE_SECONDS
        time.sleep(_RETRY_SECONDS)
