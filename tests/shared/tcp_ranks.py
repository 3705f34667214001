"""The ends of groups over TCP in this process, connected as `starting.nodes` connects those of several machines."""

from __future__ import annotations

import socket
from typing import Any

from pagemill_kernels.ranks.rank_signals import RankSignals
from pagemill_kernels.ranks.tcp_group import TcpGroup


def pairs_of(size: int) -> list[dict[int, socket.socket]]:
    """Return the connections of each rank to all others."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first + 1, size):
            found[first][second], found[second][first] = socket.socketpair()
    return found


def tcp_groups(size: int, stuck_seconds: float, members: int | None) -> tuple[list[Any], list[RankSignals]]:
    groups = [
        TcpGroup(connections, rank, size, members or size, stuck_seconds)
        for rank, connections in enumerate(pairs_of(size))
    ]
    ends = [socket.socketpair() for _ in range(1, size)]
    signals = [RankSignals(groups[0], {rank: end[0] for rank, end in enumerate(ends, 1)}, {})]
    signals += [RankSignals(groups[rank], {0: end[1]}, {}) for rank, end in enumerate(ends, 1)]
    for each in signals:
        each.start()
    return groups, signals
