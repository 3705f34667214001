"""The latest report of one endpoint and its freshness.

Pure bookkeeping of one state stream (`pagemill_protocol.report.state`): gaps, age, and the load from elsewhere.
`pagemill_gateway.discovery.state_streams` reads the stream. A stale report does not make an endpoint unusable: the
brain then uses its own counts.
"""

from __future__ import annotations

import math
from collections import deque

from pagemill_protocol.hashes import HASH_VERSION, blocks_per_prefix_chunk
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.interface import HashScheme

EXTERNAL_WINDOW = 4
"""Load from elsewhere is the minimum over this many reports, because one from before our request's end has too much."""
NO_SCHEME = HashScheme("", "", 0, 0)


class StateGap(Exception):
    """A frame is missing, so the following ones cannot be applied. Reconnect for a snapshot."""


class EndpointReports:
    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._connected = False
        self._received_at = 0.0
        self.fresh_until = -math.inf
        """The time until which the report is fresh."""
        self._external: deque[int] = deque(maxlen=EXTERNAL_WINDOW)
        self.external = 0
        """The number of requests from elsewhere, by the latest reports."""
        self._external_low_priority: deque[int] = deque(maxlen=EXTERNAL_WINDOW)
        self.latest: StateFrame | None = None
        """The latest frame. It is kept while the stream is down, because digests and limits stay valid."""
        self.scheme = NO_SCHEME
        """The engine's scheme of block hashes."""
        self.first_chunks = 1
        """Prefix chunks of the scheme that are one of the first cache kind."""
        self.connected_at = 0.0
        """The arrival of the latest stream's snapshot."""
        self.num_gaps = 0
        self.num_identities = 0
        """A counter that increases when tokenizer, weights, blocks or context change."""

    @property
    def connected(self) -> bool:
        """Whether a stream is open and its snapshot has arrived."""
        return self._connected

    def accept(self, frame: StateFrame, in_flight: int, now: float, num_low_priority: int = 0) -> None:
        """Apply a frame. `in_flight` is the number of our requests, of which `num_low_priority` have low priority.

        Raises `StateGap`.
        """
        before = self.latest
        follows = self._connected and before is not None and frame.sequence == before.sequence + 1
        if not (frame.snapshot or follows):
            self.disconnected()
            self.num_gaps += 1
            raise StateGap(f"state frame {frame.sequence} does not follow")
        if frame.snapshot:
            self.connected_at = now
        if before is None or _differ(frame, before):
            self.scheme = scheme_of(frame)
            self.first_chunks = max(1, _first_chunk_blocks(frame) // max(1, self.scheme.prefix_chunk_blocks))
            self.num_identities += 1
        self._connected = True
        self._received_at = now
        self.fresh_until = -math.inf if frame.frozen_s else now + self._stale_after_s
        self.latest = frame
        reported = frame.load.num_requests_running + frame.load.num_requests_waiting
        self._external.append(max(0, reported - in_flight))
        self.external = min(self._external)
        self._external_low_priority.append(max(0, frame.load.num_low_priority_requests - num_low_priority))

    def disconnected(self) -> None:
        self._connected = False
        self.fresh_until = -math.inf
        self._external.clear()
        self.external = 0
        self._external_low_priority.clear()

    def age_s(self, now: float) -> float | None:
        return now - self._received_at if self.latest is not None else None

    def fresh(self, now: float) -> bool:
        return now <= self.fresh_until

    def arriving(self, now: float) -> bool:
        """Whether frames arrive; engines send one at least every second."""
        return self._connected and now - self._received_at <= self._stale_after_s

    def external_low_priority(self) -> int:
        """Return the number of low-priority requests in `external`."""
        return min(self.external, min(self._external_low_priority, default=0))


def _differ(one: StateFrame, other: StateFrame) -> bool:
    """Whether the frames differ in tokenizer, weights, blocks or context."""
    return (
        one.digests != other.digests
        or one.block_size != other.block_size
        or one.prefix_chunk_blocks != other.prefix_chunk_blocks
        or one.further_chunk_blocks != other.further_chunk_blocks
        or one.max_model_len != other.max_model_len
    )


def scheme_of(frame: StateFrame) -> HashScheme:
    """Return the frame's scheme; `NO_SCHEME` if it has none or one of another version."""
    if frame.block_size < 1 or not frame.digests.weights or frame.digests.hash_version != HASH_VERSION:
        return NO_SCHEME
    chunk_blocks = frame.further_chunk_blocks or _first_chunk_blocks(frame)
    return HashScheme(frame.digests.weights, frame.digests.kv_dtype, frame.block_size, chunk_blocks)


def _first_chunk_blocks(frame: StateFrame) -> int:
    return frame.prefix_chunk_blocks or blocks_per_prefix_chunk(frame.block_size)
