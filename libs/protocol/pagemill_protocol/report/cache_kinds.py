"""Cache kinds: which of a sequence's blocks a layer's cache still needs, and what follows from it.

All kinds have blocks of the same tokens under the same chain of hashes (`pagemill_protocol.hashes`). They differ in one
function: `first_needed`, the first block that a sequence with n computed tokens still reads. What is freed behind a
window, what a prefix hit requires and how many blocks a sequence holds follow from it. Engine, planner, gateway and
simulator compute these here only; blocks themselves are `pagemill_engine.kv`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec


class CacheKind(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layers whose caches follow one rule, whatever the shapes of their vectors."""

    name: str = "full"
    window: int | None = None
    """Tokens that a token reads, itself included; None: all."""


FULL = CacheKind()
"""The only kind of most models: every token reads all tokens before it."""


def first_needed(kind: CacheKind, num_tokens: int, block_size: int) -> int:
    """Return the first block that a sequence with `num_tokens` computed tokens still needs."""
    if kind.window is None:
        return 0
    return max(0, num_tokens - kind.window + 1) // block_size


def most_held(kind: CacheKind, num_computed: int, num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds at a time while `num_computed` tokens become `num_tokens`, in steps
    of at most `step_tokens`."""
    held = -(-num_tokens // block_size) - first_needed(kind, num_computed, block_size)
    if kind.window is None:
        return held
    return min(held, -(-(kind.window - 1 + step_tokens) // block_size) + 1)


def longest_match(
    kinds: Sequence[CacheKind], num_blocks: int, block_size: int, cached: Callable[[int, int], object]
) -> int:
    """Return the most leading blocks, at most `num_blocks`, behind which a sequence can resume.

    `cached`: whether a kind, by its number, has the block of an index. A sequence can resume behind i blocks exactly
    when every kind has its blocks from the first that is still needed to i - 1.
    """
    windows = []
    for number, kind in enumerate(kinds):
        if kind.window is not None:
            windows.append((number, kind))
            continue
        for index in range(num_blocks):
            if not cached(number, index):
                num_blocks = index
                break
    if not windows:
        return num_blocks
    longest = 0
    last_missing = [-1] * len(kinds)
    for index in range(num_blocks):
        resumable = True
        for number, kind in windows:
            if not cached(number, index):
                last_missing[number] = index
            if last_missing[number] >= first_needed(kind, (index + 1) * block_size, block_size):
                resumable = False
        if resumable:
            longest = index + 1
    return longest
