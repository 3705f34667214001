"""Tracks what kopf does not report to its handlers: when each watch last received anything, and complete listings.

A listing shows no deletions: an object deleted while the watch was down would stay in the caches. So the identities of
each listing are kept until the watch that follows it starts, and are then compared with the caches. `session` reports
from the connection, `handlers` report the objects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pagemill_kube.kinds import Kind

Identity = tuple[str, str]
"""(namespace, name)"""


class StreamId(NamedTuple):
    """One watch: a kind, in one namespace or (empty) in all."""

    kind: str
    namespace: str = ""


@dataclass
class _Stream:
    received_at: float
    """When the watch last received anything, bookmarks included."""
    tried_at: float
    """When the watch last received anything or failed to connect: then the operator is alive, even if the server is
    not.
    """
    listed: set[Identity] | None = None
    """Identities of a listing whose watch has not begun."""
    pending: set[Identity] = field(default_factory=set)
    """Identities of the first listing that have not been handled yet."""
    has_listed: bool = False


class Watches:
    def __init__(
        self,
        kinds: Iterable[Kind],
        namespaces: Iterable[str] = (),
        *,
        on_listed: Callable[[str, str, set[Identity]], None] = lambda kind, namespace, identities: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_listed` is called with kind, namespace (empty: all) and all identities of a complete listing."""
        self._clock = clock
        self._on_listed = on_listed
        self._synced = asyncio.Event()
        now = clock()
        scopes = list(namespaces) or [""]
        self._streams = {StreamId(kind.name, namespace): _Stream(now, now) for kind in kinds for namespace in scopes}

    async def wait_synced(self) -> None:
        """Wait until all objects of the first listings have reached the caches."""
        await self._synced.wait()

    def age_s(self, kind: str) -> float:
        """Return the seconds since the quietest watch of a kind last received anything."""
        return self._oldest(kind, lambda stream: stream.received_at)

    def stalled_s(self) -> float:
        """Return the seconds since the quietest watch of all received anything or at least tried to connect."""
        return self._oldest(None, lambda stream: stream.tried_at)

    def unsynced(self) -> list[str]:
        return sorted(
            {at.kind for at, stream in self._streams.items() if not stream.has_listed or stream.pending},
        )

    def received(self, at: StreamId) -> None:
        if stream := self._streams.get(at):
            stream.received_at = stream.tried_at = self._clock()

    def tried(self, at: StreamId) -> None:
        if stream := self._streams.get(at):
            stream.tried_at = self._clock()

    def page(self, at: StreamId, identities: Iterable[Identity], *, is_first: bool) -> None:
        """Add one page of a listing."""
        if not (stream := self._streams.get(at)):
            return
        self.received(at)
        if is_first or stream.listed is None:
            stream.listed = set()
        identities = set(identities)
        stream.listed |= identities
        if not stream.has_listed:
            stream.pending |= identities

    def watch_begins(self, at: StreamId) -> None:
        """Complete the listing; called before the watch can receive anything."""
        if not (stream := self._streams.get(at)):
            return
        listed, stream.listed = stream.listed, None
        if listed is not None:
            stream.has_listed = True
            self._on_listed(at.kind, at.namespace, listed)
            self._note_synced()

    def handled(self, kind: str, identity: Identity) -> None:
        """Note that the object has reached the caches."""
        for namespace in (identity[0], ""):
            if stream := self._streams.get(StreamId(kind, namespace)):
                stream.pending.discard(identity)
        self._note_synced()

    def _note_synced(self) -> None:
        if not self._synced.is_set() and not self.unsynced():
            self._synced.set()

    def _oldest(self, kind: str | None, when: Callable[[_Stream], float]) -> float:
        times = [when(stream) for at, stream in self._streams.items() if kind in (None, at.kind)]
        return max(0.0, self._clock() - min(times)) if times else 0.0
