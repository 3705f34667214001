"""What ranks on several machines tell each other beside values: where they are, that a step failed, that one is lost.

Rank 0 has a connection to each other rank and passes on what concerns all. A thread of each rank says every few tenths
of a second what it does, so that rank 0 names one that has ended, is silent, or is stuck: it has come to no further cut
for `stuck_seconds`, while others have waited for it. Looks are counted, not seconds: a process that was stopped itself
accuses none.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pagemill_kernels.ranks.group import ComputedTime
from pagemill_kernels.ranks.places import RankStatus
from pagemill_kernels.ranks.tcp_group import Signal, TcpGroup

_MOST_SECONDS = 0.25
"""How often a rank says what it does, at least."""
_SILENT_LOOKS = 10
"""After so many looks without a word a rank's last word is old."""


class RankSignals:
    def __init__(self, group: TcpGroup, connections: Mapping[int, socket.socket], names: Mapping[int, str]) -> None:
        """Use connections to all other ranks (on rank 0), or to rank 0. `names`: of ranks, for messages."""
        self._group, self._connections, self._names = group, dict(connections), names
        self._seconds = min(_MOST_SECONDS, group.stuck_seconds / 20)
        self._most_looks = round(group.stuck_seconds / self._seconds)
        self._silent = dict.fromkeys(connections, 0)
        self._waits: dict[int, tuple[tuple[int, int], int]] = {}
        """For ranks that wait: the rank that keeps them and its progress, and how often both were found so."""
        self._answers: dict[int, queue.SimpleQueue[str]] = {rank: queue.SimpleQueue() for rank in connections}
        self._finished: set[int] = set()
        """Ranks that have said that they end."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._ended = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        group.tell = self.tell
        for connection in connections.values():
            connection.settimeout(group.stuck_seconds)

    def start(self) -> None:
        self._thread.start()

    def tell(self, signal: Signal) -> None:
        self._send([signal.kind, *signal[1:]])

    def answer(self, text: str) -> None:
        """Give rank 0 an answer to what it sent with the plans."""
        self._send(["answer", text])

    def answers(self) -> list[str]:
        """Wait for an answer of each other rank, and return these; what a lost one would say is that it has ended."""
        return [self._answer_of(rank) for rank in self._connections]

    def _answer_of(self, rank: int) -> str:
        while True:
            try:
                return self._answers[rank].get(timeout=_MOST_SECONDS)
            except queue.Empty:
                if self._group.is_lost or rank not in self._silent or not self._thread.is_alive():
                    return f"{self._name(rank)} has ended."

    def let_end(self) -> None:
        """Do not call ranks lost any more that end."""
        self._closing.set()

    def say_end(self, seconds: float) -> None:
        """Tell rank 0 that this rank ends as it should, and wait until it has read that: what is unread when a
        connection is closed may be lost."""
        self._send(["ends"])
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self.wait_for_ends(seconds)

    def close(self) -> None:
        self._closing.set()
        os.eventfd_write(self._ended, 1)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def wait_for_ends(self, seconds: float) -> bool:
        """Wait until all other ranks have ended their connections. Returns whether they have."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _send(self, words: list[Any], but: int | None = None) -> None:
        line = json.dumps(words).encode() + b"\n"
        with self._lock:
            for rank, connection in self._connections.items():
                if rank != but:
                    with suppress(OSError):  # the thread finds that it has ended
                        connection.sendall(line)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for file in ranks:
            poll.register(file, select.POLLIN)
        data = dict.fromkeys(self._connections, b"")
        group, own, due = self._group, self._group.rank, 0.0
        while ranks:
            for file, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000):
                if file == self._ended:
                    return
                rank = ranks[file]
                piece = self._received(rank)
                *lines, data[rank] = (data[rank] + piece).split(b"\n")
                self._silent[rank] = 0
                for line in lines:
                    self._hear(rank, json.loads(line))
                if not piece:
                    poll.unregister(file)
                    del ranks[file], self._silent[rank]
                    if rank not in self._finished:
                        self._lose(f"{self._name(rank)} ended its connection; it was last {group.place(rank)}")
            if time.monotonic() >= due:
                due = time.monotonic() + self._seconds
                self._send(["at", *group.statuses[own], group.waits_for[own], *group.times[own]])
                self._look()

    def _received(self, rank: int) -> bytes:
        try:
            return self._connections[rank].recv(1 << 16)
        except OSError:
            return b""

    def _hear(self, rank: int, words: list[Any]) -> None:
        if words[0] == "ends":
            self._finished.add(rank)
            return
        if words[0] == "answer":
            self._answers[rank].put(words[1])
            return
        if words[0] == "at":
            self._group.statuses[rank] = RankStatus(*words[1:5])
            self._group.waits_for[rank] = words[5]
            self._group.times[rank] = ComputedTime(*words[6:8])
            return
        signal = Signal(*words)
        if self._group.rank == 0 and signal.kind == "failed":
            self._send(words, but=rank)
        self._group.hear(rank, signal)

    def _look(self) -> None:
        for rank in self._silent:
            self._silent[rank] += 1
            if self._silent[rank] > 2 * self._most_looks:  # one that others wait for is named before
                seconds = 2 * self._group.stuck_seconds
                self._lose(
                    f"{self._name(rank)} has said nothing for {seconds:g} s; it was last {self._group.place(rank)}"
                )
        if self._group.rank == 0:
            for rank in range(self._group.size):
                self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        """Count for how long a rank waits for another one that comes no further."""
        if self._group.waits_for[rank] < 0 or self._is_silent(rank):
            self._waits.pop(rank, None)
            return
        cause = self._cause_of(rank)
        found = cause, self._group.statuses[cause].barriers
        before, looks = self._waits.get(rank, (found, -1))
        looks = looks + 1 if before == found else 0
        self._waits[rank] = found, looks
        if looks >= self._most_looks:
            self._lose(
                f"{self._name(cause)} has not reached {self._group.cut(rank)} within {self._group.stuck_seconds:g} s; "
                f"it was last {self._group.place(cause)}"
            )

    def _cause_of(self, rank: int) -> int:
        """Return the rank that keeps one waiting, perhaps by a chain of others; what a silent one said is old."""
        cause = self._group.waits_for[rank]
        for _ in range(self._group.size):
            following = self._group.waits_for[cause]
            if following < 0 or following == rank or self._is_silent(cause):
                break
            cause = following
        return cause

    def _is_silent(self, rank: int) -> bool:
        return self._silent.get(rank, 0) > _SILENT_LOOKS

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]})" if rank in self._names else f"rank {rank}"

    def _lose(self, reason: str) -> None:
        if not self._closing.is_set() and not self._group.is_lost:
            self._group.lose(reason)
