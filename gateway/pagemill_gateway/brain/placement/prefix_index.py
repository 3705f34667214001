"""The index of reported prefixes: a table from the hash of a prefix chunk to the set of pods that have it.

A set of pods is an int with one bit per pod, so a lookup takes one dict access per prefix chunk regardless of the
number of pods. A pod that leaves or sends a new snapshot loses its bit at once. The bit is removed from the table
later, a few entries with every frame that adds some, and is reused after that. `brain.placement.predictions` has the
prefixes that the gateway only expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import and_

from pagemill_protocol.hashes import key_of_kind
from pagemill_protocol.report.cache_kinds import CacheKind, first_needed

SWEEP_STEP = 1024
"""Number of entries that are swept with every frame that adds prefix chunks."""


class PrefixIndex:
    def __init__(self) -> None:
        self._pods: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        """Bits that are in no entry of the table."""
        self._num_bits = 0
        self._retired = 0
        """Bits of removed pods, for the next sweep."""
        self._sweeping = 0
        self._unswept: list[bytes] = []

    def __len__(self) -> int:
        """The number of prefix chunks in the table."""
        return len(self._pods)

    def bit(self, endpoint_id: str) -> int:
        """Return the pod's bit; 0 before its first snapshot."""
        return self._bits.get(endpoint_id, 0)

    def snapshot(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        """Replace the pod's prefix chunks."""
        self.forget(endpoint_id)
        self._bits[endpoint_id] = self._new_bit()
        self.add(endpoint_id, prefix_chunks)

    def add(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        bit, pods = self._bits[endpoint_id], self._pods
        for chunk in prefix_chunks:
            mask = pods.get(chunk)
            # Entries with one pod share the pod's int object, which saves memory.
            pods[chunk] = bit if mask is None else mask | bit
        self._sweep()

    def remove(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        clear(self._pods, self._bits[endpoint_id], prefix_chunks)

    def forget(self, endpoint_id: str) -> None:
        """Remove a pod that is gone or sends a new snapshot."""
        self._retired |= self._bits.pop(endpoint_id, 0)

    def knows(self, chunk: bytes, expected: Mapping[bytes, int]) -> bool:
        """Whether any pod has the prefix chunk, or is expected to have it."""
        return chunk in self._pods or chunk in expected

    def depths(self, prefix_chunks: Sequence[bytes], pods: int, expected: Mapping[bytes, int]) -> dict[int, int]:
        """Return the number of leading prefix chunks that each pod has, by its bit, without pods that have none.

        `pods` are the bits to look for, and `expected` has further prefix chunks with their pods.
        """
        found: dict[int, int] = {}
        known, alive = self._pods, pods
        for depth, chunk in enumerate(prefix_chunks):
            having = alive & (known.get(chunk, 0) | expected.get(chunk, 0))
            if depth and having != alive:
                found.update(dict.fromkeys(_each(alive ^ having), depth))
            alive = having
            if not alive:
                return found
        found.update(dict.fromkeys(_each(alive), len(prefix_chunks)))
        return found

    def depths_of_kinds(
        self,
        prefix_chunks: Sequence[bytes],
        pods: int,
        expected: Mapping[bytes, int],
        kinds: Sequence[CacheKind],
        chunk_tokens: int,
        first_chunks: int = 1,
    ) -> dict[int, int]:
        """Return what `depths` does for pods whose models have these cache kinds.

        A pod can resume behind a number of chunks if it has all of them in full kinds, and in windowed ones those from
        the first that is still needed (`report.cache_kinds.first_needed`). `first_chunks`: how many of them the first
        kind reports as one. What is behind its last one is known by the others, which report what it has as well.
        """
        resumable = [pods] * len(prefix_chunks)
        for number, kind in enumerate(kinds):
            every = 1 if number else first_chunks
            having = [
                self._pods.get(key_of_kind(number, chunk), 0) | expected.get(chunk, 0) if end % every == 0 else -1
                for end, chunk in enumerate(prefix_chunks, 1)
            ]
            starts = (first_needed(kind, chunk_tokens * end, chunk_tokens) for end in range(1, len(having) + 1))
            masks = accumulate(having, and_) if kind.keeps_all else _in_all(having, starts)
            for index, mask in enumerate(masks):
                resumable[index] &= mask
        found: dict[int, int] = {}
        rest = pods
        for index in range(len(resumable) - 1, -1, -1):
            if deepest := resumable[index] & rest:
                found.update(dict.fromkeys(_each(deepest), index + 1))
                rest ^= deepest
        return found

    def has(self, chunk: bytes, bit: int) -> bool:
        return self._pods.get(chunk, 0) & bit != 0

    def prefix_chunks_of(self, endpoint_id: str) -> set[bytes]:
        """Return all prefix chunks of a pod, for tests and debugging. O(table)."""
        bit = self.bit(endpoint_id)
        return {chunk for chunk, mask in self._pods.items() if mask & bit}

    def _new_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def _sweep(self) -> None:
        """Remove the bits of removed pods from a part of the table."""
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._unswept = list(self._pods)
        gone, pods = self._sweeping, self._pods
        batch = self._unswept[-SWEEP_STEP:]
        del self._unswept[-SWEEP_STEP:]
        for chunk in batch:
            mask = pods.get(chunk, 0)
            if not mask & gone:
                continue
            left = mask & ~gone
            if left:
                pods[chunk] = left
            else:
                del pods[chunk]
        if not self._unswept:
            self._free += _each(gone)
            self._sweeping = 0


def clear(pods: dict[bytes, int], bit: int, prefix_chunks: Iterable[bytes]) -> None:
    """Remove a pod's bit from prefix chunks, and the chunks that no pod has any more."""
    for chunk in prefix_chunks:
        mask = pods.get(chunk, 0)
        if not mask & bit:
            continue
        if mask == bit:
            del pods[chunk]
        else:
            pods[chunk] = mask ^ bit


def _in_all(masks: Sequence[int], starts: Iterable[int]) -> Iterator[int]:
    """Yield, for each place, the bits that are in all masks from its start to it. Starts never fall.

    The masks before `split` are kept as the bits that are in all from each to `split`, the later ones as one mask, so
    that a step costs the same whatever the distance to its start.
    """
    before: dict[int, int] = {}
    split, since = 0, -1
    for place, start in enumerate(starts):
        since &= masks[place]
        if start >= split:
            all_of = -1
            for earlier in range(place, start - 1, -1):
                all_of &= masks[earlier]
                before[earlier] = all_of
            split, since = place + 1, -1
        yield before.get(start, -1) & since if start <= place else -1


def _each(mask: int) -> list[int]:
    """Return the single bits of a mask."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
