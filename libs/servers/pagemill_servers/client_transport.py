"""The transport to one client, with bounds on how long its answers and its unread body may keep the connection open.

A client has to take 64 KiB, or all that waits for it, in each `write_timeout_s`; otherwise the connection is aborted.
A connection that closes before the client's body has been read first drops what is still arriving, up to limits:
closing at once would reset the connection, and the client could lose its answer. `connection` decides when to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

MIN_TAKEN_BYTES = 64 * 1024
HIGH_WATER_BYTES = 16 * 1024
"""Unsent bytes at which writers wait; the kernel holds as many again."""
MAX_DISCARDED_BYTES = 128 * 1024 * 1024
"""Bytes of a body that are dropped after its answer; more than a file of a batch has by default."""
DISCARD_TIMEOUT_S = 30.0
DISCARD_IDLE_S = 3.0
"""A client that has sent nothing for this long, and does not close, is waiting for nothing."""


class ClientTransport:
    """Wraps a transport. Writing costs no more than without it."""

    __slots__ = (
        "_closing",
        "_discard_timer",
        "_discard_until_s",
        "_loop",
        "_num_discarded",
        "_num_seen",
        "_transport",
        "_unsent",
        "_write_timeout_s",
        "_write_timer",
        "read_rest",
        "write",
    )

    def __init__(self, transport: asyncio.Transport, write_timeout_s: float, read_rest: Callable[[], bool]) -> None:
        """`read_rest`: makes the connection read on if the client may still be sending, else returns false."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._write_timeout_s = write_timeout_s
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._closing = False
        self._discard_timer: asyncio.TimerHandle | None = None
        self._discard_until_s = 0.0
        self._num_discarded = self._num_seen = 0
        self.read_rest = read_rest
        self.write: Callable[[bytes], None] = transport.write
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        _limit_unsent(transport, HIGH_WATER_BYTES)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close after everything written has been sent, and after what the client is sending was dropped."""
        if self._closing:
            return
        self._closing = True
        self.bound_writes()
        if not self._transport.is_closing() and self.read_rest():
            self._discard_rest()
        else:
            self._transport.close()

    def unwrapped(self) -> asyncio.Transport:
        """Return the transport itself, which this object bounds no longer."""
        self.stop_bounding()
        self._transport.set_write_buffer_limits()
        _limit_unsent(self._transport, 0)
        return self._transport

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def end_discarding(self) -> None:
        """Close now if only the rest of a body is awaited."""
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None
            self._transport.close()

    def lost(self) -> None:
        """End all timers, because the connection is lost."""
        self._closing = True
        self.read_rest = _nothing_left  # refers to the connection, which refers to this object
        self.stop_bounding()
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def bound_writes(self) -> None:
        """Give the client `write_timeout_s` from now for what is unsent, if it does not have a time already.

        Nothing else may be written meanwhile, or until `stop_bounding`.
        """
        if self._write_timer is None and (unsent := self._transport.get_write_buffer_size()):
            self._unsent = unsent
            self._write_timer = self._loop.call_later(self._write_timeout_s, self._check_writes)

    def stop_bounding(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def discarded(self, num_bytes: int) -> None:
        """Count bytes that arrived after `close`."""
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED_BYTES:
            self.end_discarding()

    def _check_writes(self) -> None:
        self._write_timer = None
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent > self._unsent - MIN_TAKEN_BYTES:
            self.abort()
        elif unsent:
            self.bound_writes()

    def _discard_rest(self) -> None:
        if self._transport.can_write_eof():  # the client sees the end of the answer, also if it waits for it
            with contextlib.suppress(OSError, RuntimeError):
                self._transport.write_eof()
        self._discard_until_s = self._loop.time() + DISCARD_TIMEOUT_S
        self._discard_timer = self._loop.call_later(DISCARD_IDLE_S, self._check_discarding)

    def _check_discarding(self) -> None:
        if self._num_discarded == self._num_seen or self._loop.time() >= self._discard_until_s:
            self.end_discarding()
            return
        self._num_seen = self._num_discarded
        self._discard_timer = self._loop.call_later(DISCARD_IDLE_S, self._check_discarding)


def _nothing_left() -> bool:
    return False


def _limit_unsent(transport: asyncio.Transport, num_bytes: int) -> None:
    """Limit what the kernel takes beyond what the client's window allows, where it can; 0 is its own limit.

    Otherwise each client that does not read takes megabytes of the kernel's memory, which count for the container.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    connection = transport.get_extra_info("socket")
    if option is not None and connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, num_bytes)
