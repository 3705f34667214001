"""Which pods have which prefix: one table from the hash of a prefix chunk to a set of pods, written by frames only.

A set of pods is an int with one bit per pod (its slot), so a lookup costs one dict access per prefix chunk however many
pods there are. A pod that leaves, or sends a new snapshot, just loses its slot; its bit is swept out of the table
later, a few entries with every frame that brings some, and only then is the slot used again. What the gateway merely
expects to be cached is kept apart (`brain.placement.predictions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SWEEP_STEP = 1024
"""Entries swept with every frame that brings prefix chunks."""


class PrefixIndex:
    def __init__(self) -> None:
        self._pods: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        """Bits that no entry of the table has any more."""
        self._num_bits = 0
        self._retired = 0
        """Bits of pods that are gone, waiting for the next sweep."""
        self._sweeping = 0
        self._unswept: list[bytes] = []

    def __len__(self) -> int:
        """Prefix chunks known of any pod."""
        return len(self._pods)

    def bit(self, endpoint_id: str) -> int:
        """The pod's bit; 0 before its first snapshot."""
        return self._bits.get(endpoint_id, 0)

    def snapshot(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        """The pod has exactly these."""
        self.forget(endpoint_id)
        self._bits[endpoint_id] = self._new_bit()
        self.add(endpoint_id, prefix_chunks)

    def add(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        bit, pods = self._bits[endpoint_id], self._pods
        for chunk in prefix_chunks:
            mask = pods.get(chunk)
            # The pod's own int is stored where it is the only one, so most entries share a few objects.
            pods[chunk] = bit if mask is None else mask | bit
        self._sweep()

    def remove(self, endpoint_id: str, prefix_chunks: Iterable[bytes]) -> None:
        clear(self._pods, self._bits[endpoint_id], prefix_chunks)

    def forget(self, endpoint_id: str) -> None:
        """The pod is gone, or sends a new snapshot."""
        self._retired |= self._bits.pop(endpoint_id, 0)

    def knows(self, chunk: bytes, expected: Mapping[bytes, int]) -> bool:
        """Whether any pod has it, or will by `expected`."""
        return chunk in self._pods or chunk in expected

    def depths(self, prefix_chunks: Sequence[bytes], pods: int, expected: Mapping[bytes, int]) -> dict[int, int]:
        """How many leading prefix chunks each pod has, by its bit; pods without the first one are left out.

        `pods`: the bits to look for. `expected`: further prefix chunks with their pods.
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

    def has(self, chunk: bytes, bit: int) -> bool:
        return self._pods.get(chunk, 0) & bit != 0

    def prefix_chunks_of(self, endpoint_id: str) -> set[bytes]:
        """Everything the pod has. O(table): for tests and people."""
        bit = self.bit(endpoint_id)
        return {chunk for chunk, mask in self._pods.items() if mask & bit}

    def _new_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def _sweep(self) -> None:
        """Remove the bits of departed pods from a part of the table."""
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
    """Take the pod's bit from these prefix chunks; one without any pod leaves the table."""
    for chunk in prefix_chunks:
        mask = pods.get(chunk, 0)
        if not mask & bit:
            continue
        if mask == bit:
            del pods[chunk]
        else:
            pods[chunk] = mask ^ bit


def _each(mask: int) -> list[int]:
    """The single bits of a mask."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits
