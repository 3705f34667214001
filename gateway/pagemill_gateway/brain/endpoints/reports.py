"""The latest report of one endpoint, and how far it can be trusted.

Pure bookkeeping of one state stream (`pagemill_protocol.state`): sequence gaps, age, and the load that comes from
elsewhere. The stream itself is read by `pagemill_gateway.discovery.state_streams`. A report that cannot be trusted
never makes an endpoint unusable: the brain then uses its own in-flight count.
"""

from __future__ import annotations

import math
from collections import deque

from pagemill_gateway.brain.interface import HashScheme
from pagemill_protocol.hashes import HASH_VERSION, blocks_per_prefix_chunk
from pagemill_protocol.state import StateFrame

EXTERNAL_WINDOW = 4
"""Load from elsewhere is the minimum over this many reports: one that our own finish overtook must not raise it."""
NO_SCHEME = HashScheme("", "", 0, 0)


class StateGap(Exception):
    """A frame is missing: the following ones cannot be applied. Connect again for a snapshot."""


class EndpointReports:
    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._connected = False
        self._received_at = 0.0
        self.fresh_until = -math.inf
        """The load is current until then: the engine process that has it runs and its server reports."""
        self._external: deque[int] = deque(maxlen=EXTERNAL_WINDOW)
        self.external = 0
        """Requests there that are not ours, by the latest reports."""
        self._external_giving_way: deque[int] = deque(maxlen=EXTERNAL_WINDOW)
        self.latest: StateFrame | None = None
        """Kept over reconnects: digests and limits stay true while the stream is down."""
        self.scheme = NO_SCHEME
        """How it hashes its blocks."""
        self.connected_at = 0.0
        """When the latest stream's snapshot arrived."""
        self.num_gaps = 0
        self.num_identities = 0
        """Increases when its tokenizer, weights, blocks or context change."""

    @property
    def connected(self) -> bool:
        """A stream is open and its snapshot has arrived."""
        return self._connected

    def accept(self, frame: StateFrame, in_flight: int, now: float, num_giving_way: int = 0) -> None:
        """Apply one frame; `in_flight` is our own count at this instant, and `num_giving_way` of them give way. Raises
        `StateGap`.
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
            self.num_identities += 1
        self._connected = True
        self._received_at = now
        self.fresh_until = -math.inf if frame.frozen_s else now + self._stale_after_s
        self.latest = frame
        reported = frame.load.num_requests_running + frame.load.num_requests_waiting
        self._external.append(max(0, reported - in_flight))
        self.external = min(self._external)
        self._external_giving_way.append(max(0, frame.load.num_requests_giving_way - num_giving_way))

    def disconnected(self) -> None:
        self._connected = False
        self.fresh_until = -math.inf
        self._external.clear()
        self.external = 0
        self._external_giving_way.clear()

    def age_s(self, now: float) -> float | None:
        return now - self._received_at if self.latest is not None else None

    def fresh(self, now: float) -> bool:
        return now <= self.fresh_until

    def arriving(self, now: float) -> bool:
        """Engines send a frame at least every second."""
        return self._connected and now - self._received_at <= self._stale_after_s

    def external_giving_way(self) -> int:
        """Those of `external` that give way."""
        return min(self.external, min(self._external_giving_way, default=0))


def _differ(one: StateFrame, other: StateFrame) -> bool:
    """In tokenizer, weights, blocks or context."""
    return (
        one.digests != other.digests
        or one.block_size != other.block_size
        or one.prefix_chunk_blocks != other.prefix_chunk_blocks
        or one.max_model_len != other.max_model_len
    )


def scheme_of(frame: StateFrame) -> HashScheme:
    """`NO_SCHEME`: the frame does not say, or the engine hashes another way than gateways do."""
    if frame.block_size < 1 or not frame.digests.weights or frame.digests.hash_version != HASH_VERSION:
        return NO_SCHEME
    prefix_chunk_blocks = frame.prefix_chunk_blocks or blocks_per_prefix_chunk(frame.block_size)
    return HashScheme(frame.digests.weights, frame.digests.kv_dtype, frame.block_size, prefix_chunk_blocks)
