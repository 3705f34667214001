"""The index of reported prefixes: a table from the hash of a prefix chunk to the set of pods that have it.

A set of pods is an int with one bit per pod, so a lookup takes one dict access per prefix chunk regardless of the
number of pods. A pod that leaves or sends a new snapshot loses its bit at once. The bit is removed from the table
later, a few entries with every frame that adds some, and is reused after that. `brain.placement.predictions` has the
prefixes that the gateway only expects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
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

        Full kinds are read up to the first chunk that no pod has, windows from there backwards until every pod's depth
        is known: one window, where all pods can resume behind the last chunk.
        """
        most = len(prefix_chunks)
        runs: list[tuple[int, list[int]]] = []
        windows: list[_Window] = []
        for number, kind in enumerate(kinds):
            every, suffix = 1 if number else first_chunks, key_of_kind(number, b"")
            if kind.keeps_all:
                run = self._run(prefix_chunks[every - 1 : most : every], suffix, pods, expected)
                runs.append((every, run))
                most = min(most, every * len(run) - 1)
            elif length := len(prefix_chunks) - first_needed(kind, chunk_tokens * len(prefix_chunks), chunk_tokens):
                windows.append(_Window(self._pods, expected, prefix_chunks, suffix, every, length))
        found: dict[int, int] = {}
        rest, depth = pods, most
        while rest and depth > 0:
            deepest = rest
            for every, run in runs:
                deepest &= run[depth // every]
            for window in windows:
                if deepest:
                    deepest &= window.before(depth)
            depth -= 1
            if deepest:
                found.update(dict.fromkeys(_each(deepest), depth + 1))
                rest ^= deepest
                for every, run in runs:
                    depth = min(depth, every * _length_of(run, rest) - 1)
        return found

    def _run(
        self, prefix_chunks: Sequence[bytes], suffix: bytes, pods: int, expected: Mapping[bytes, int]
    ) -> list[int]:
        """Return which of `pods` have all of the first chunks of a full kind: none of them, one, and so on, as long as
        there are any. `suffix`: of the kind's names."""
        known, run = self._pods, [pods]
        for chunk in prefix_chunks:
            pods &= known.get(chunk + suffix, 0) | expected.get(chunk, 0)
            if not pods:
                break
            run.append(pods)
        return run

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


def _length_of(run: Sequence[int], pods: int) -> int:
    """Return the length of a run of falling sets up to the last that has one of `pods`."""
    return bisect_left(run, True, key=lambda each: not each & pods)


class _Window:
    """Which pods have all chunks of a kind's window, wherever it ends.

    Chunks are read in parts of the window's length, when one of a part is asked for. Each window is the end of one part
    and the beginning of the next, so that asking for all windows costs the same whatever their length.
    """

    def __init__(
        self,
        known: Mapping[bytes, int],
        expected: Mapping[bytes, int],
        prefix_chunks: Sequence[bytes],
        suffix: bytes,
        every: int,
        length: int,
    ) -> None:
        """`length`: chunks in a window. `suffix`: of the kind's names. Of `every` chunks the last one is reported."""
        self._known, self._expected = known, expected
        self._prefix_chunks = prefix_chunks
        self._suffix = suffix
        self._every = every
        self._length = length
        self._parts: dict[int, tuple[list[int], list[int]]] = {}

    def before(self, end: int) -> int:
        """Return the pods that have all of the chunks in the window behind which `end` chunks end."""
        length = self._length
        if length == 1:
            return self._having(end - 1)
        part, place = divmod(end - 1, length)
        pods = self._part(part)[0][place]
        return pods & self._part(part - 1)[1][place + 1] if part and place + 1 < length else pods

    def _part(self, number: int) -> tuple[list[int], list[int]]:
        """Return the pods that have all chunks of a part up to each, and all from each on."""
        part = self._parts.get(number)
        if part is None:
            begin = number * self._length
            masks = [self._having(place) for place in range(begin, min(begin + self._length, len(self._prefix_chunks)))]
            part = list(accumulate(masks, and_)), list(accumulate(reversed(masks), and_))[::-1]
            self._parts[number] = part
        return part

    def _having(self, place: int) -> int:
        if (place + 1) % self._every:
            return -1
        chunk = self._prefix_chunks[place]
        return self._known.get(chunk + self._suffix, 0) | self._expected.get(chunk, 0)


def _each(mask: int) -> list[int]:
    """Return the single bits of a mask."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
