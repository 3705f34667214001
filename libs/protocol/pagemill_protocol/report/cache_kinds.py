"""Cache kinds: which of a sequence's blocks a layer's cache still needs, and what follows from it.

All kinds have blocks of the same tokens under the same chain of hashes (`pagemill_protocol.hashes`). They differ in one
function: `first_needed`, the first block that a sequence with n computed tokens still reads. What is freed behind a
window or a state, what a prefix hit requires and how many blocks a sequence holds follow from it. Engine, planner,
gateway and simulator compute these here only; blocks themselves are `pagemill_engine.kv`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from pagemill_protocol.hashes import prefix_chunk_blocks


class CacheKind(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layers whose caches follow one rule, whatever the shapes of their vectors."""

    name: str = "full"
    window: int | None = None
    """Tokens that a token reads, itself included; None: all."""
    layers: tuple[int, ...] = ()
    """Numbers of its layers; none: all layers."""
    block_bytes: int = 1
    """Bytes of one block in all of its layers. A cache without memory counts its blocks."""
    state: bool = False
    """Whether a block is the state of recurrent layers behind the block's last token."""
    row_bytes: int = 0
    """Bytes of the inputs since the last state that each running sequence has, in all of its layers."""

    @property
    def keeps_all(self) -> bool:
        """Whether a sequence needs each of its blocks to its end."""
        return self.window is None and not self.state


ANY_LENGTH = 1 << 60
"""Tokens of the longest sequence where nothing limits it."""
FULL = CacheKind()
"""The only kind of most models: every token reads all tokens before it."""
ONE_KIND = (FULL,)
"""The kinds of a report that names none."""


def first_needed(kind: CacheKind, num_tokens: int, block_size: int) -> int:
    """Return the first block that a sequence with `num_tokens` computed tokens still needs.

    Of states that is the one behind its last full block.
    """
    if kind.window is None:
        return max(0, num_tokens // block_size - 1) if kind.state else 0
    return max(0, num_tokens - kind.window + 1) // block_size


def most_held(kind: CacheKind, num_computed: int, num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that a sequence holds at a time while `num_computed` tokens become `num_tokens`, in steps
    of at most `step_tokens`.

    Of states that is one. A second one, where a step cannot replace the first, is no need: the sequence can wait.
    """
    if kind.state:
        return min(1, num_tokens // block_size)
    held = -(-num_tokens // block_size) - first_needed(kind, num_computed, block_size)
    if kind.window is None:
        return held
    return min(held, -(-(kind.window - 1 + step_tokens) // block_size) + 1)


def sequence_bytes(kinds: Iterable[CacheKind], num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Return the most bytes of blocks that a sequence holds until it has `num_tokens` tokens, in steps of
    `step_tokens`. Its row, with the inputs since its last state, is no block: memory is divided without it."""
    return sum(most_held(kind, 0, num_tokens, step_tokens, block_size) * kind.block_bytes for kind in kinds)


def needed_bytes(
    kinds: Iterable[CacheKind],
    num_blocks: int,
    num_sequences: int,
    num_tokens: int,
    block_size: int,
    held: Sequence[int] = (),
) -> int:
    """Return the bytes that `num_blocks` further blocks of tokens need, which `num_sequences` sequences fill.

    `num_tokens`: the most tokens of one of them at its end, which limits what it holds behind a window and of states.
    `held`: the bytes of each kind that they hold already; none: nothing.
    """
    num_bytes = 0
    for number, kind in enumerate(kinds):
        further = num_blocks * kind.block_bytes
        if kind.state or kind.window is not None:
            most = num_sequences * most_held(kind, 0, num_tokens, 1, block_size) * kind.block_bytes
            further = min(further, max(0, most - held[number]) if held else most)
        num_bytes += further
    return num_bytes


def mean_bytes(kinds: Iterable[CacheKind], num_tokens: float, block_size: int) -> float:
    """Return the bytes that a sequence of about so many tokens holds on average, with its last block half full."""
    num_bytes = 0.0
    for kind in kinds:
        tokens = num_tokens + block_size / 2
        if kind.state:
            tokens = min(tokens, block_size)
        elif kind.window is not None:
            tokens = min(tokens, kind.window - 1 + block_size)
        num_bytes += tokens / block_size * kind.block_bytes
    return num_bytes


def blocks_at(kinds: Sequence[CacheKind], counts: Sequence[int], num_tokens: int, block_size: int) -> int:
    """Return the blocks of a cache of one kind in which as many sequences of `num_tokens` tokens fit.

    `counts`: the blocks of each kind.
    """
    full = -(-num_tokens // block_size)
    return min(
        count * full // max(1, most_held(kind, 0, num_tokens, 1, block_size))
        for kind, count in zip(kinds, counts, strict=True)
    )


def most_of_first(kinds: Sequence[CacheKind], counts: Sequence[int], step_tokens: int, block_size: int) -> int:
    """Return the blocks of the first kind that one request finds where it shares the memory of `counts` blocks with the
    last kind, of which the request needs as many as the longest one does."""
    low, high = kinds[0].block_bytes, kinds[-1].block_bytes
    held = most_held(kinds[-1], 0, ANY_LENGTH, step_tokens, block_size)
    return max(counts[0], (counts[0] * low + (counts[-1] - held) * high) // low)


def one_kind(kinds: Sequence[CacheKind]) -> CacheKind:
    """Return the kind of all layers of `kinds`, which frees nothing."""
    layers = tuple(sorted(layer for kind in kinds for layer in kind.layers))
    return CacheKind(layers=layers, block_bytes=sum(kind.block_bytes for kind in kinds))


def kinds_of_windows(kinds: Sequence[CacheKind], windows: Iterable[int | None]) -> dict[int | None, int]:
    """Return the number of the kind of the layers with each window. Windows without one are in the first, which frees
    nothing."""
    numbers = {kind.window: number for number, kind in enumerate(kinds) if not kind.state}
    return {window: numbers.get(window, 0) for window in windows}


def chunk_blocks(kinds: Sequence[CacheKind], num_blocks: int, block_size: int) -> int:
    """Return the blocks of a published prefix chunk of the first kind, for a cache with `num_blocks` blocks of it.

    A sequence resumes behind any block that windows and states allow, so kinds that do not keep all publish every
    block: there are few of these.
    """
    return prefix_chunk_blocks(block_size, num_blocks) if kinds[0].keeps_all else 1


def further_chunk_blocks(kinds: Sequence[CacheKind], first: int) -> int:
    """Return the blocks of a published prefix chunk of the kinds behind the first, whose chunks have `first` blocks; 0:
    as many, or there is no such kind."""
    return 1 if len(kinds) > 1 and first > 1 else 0


def longest_match(
    kinds: Sequence[CacheKind], num_blocks: int, block_size: int, cached: Callable[[int, int], object]
) -> int:
    """Return the most leading blocks, at most `num_blocks`, behind which a sequence can resume.

    `cached`: whether a kind, by its number, has the block of an index. A sequence can resume behind i blocks exactly
    when every kind has its blocks from the first that is still needed to i - 1.
    """
    windows = []
    for number, kind in enumerate(kinds):
        if not kind.keeps_all:
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
