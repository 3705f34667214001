"""Block tables, and what the cache manager takes and returns: plain data without rules of its own (`kv.manager`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_engine.kv.kind_cache import KindCache
from pagemill_protocol.report.cache_kinds import CacheKind

Needs = list[int]
"""Numbers of blocks, one per cache kind."""


class CachedSequence(Protocol):
    """The manager's interface to a sequence. Only the manager writes `num_computed_tokens` and `block_hashes`."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    """Number of tokens whose KV is in the table's blocks once all launched steps have run."""
    cache_root: bytes
    block_hashes: list[bytes]
    """Chained hashes of the leading full blocks, as far as they were needed; kept across preemptions."""
    num_pending_tokens: int
    """Number of tokens after `token_ids` that steps in flight sample."""


@dataclass(slots=True, eq=False)
class KindTable:
    """A sequence's blocks of one kind: from index `first` to the table's end."""

    cache: KindCache
    first: int
    blocks: list[Block]
    unwritten: list[int] = field(default_factory=list)
    """Indices of the blocks that were registered in the prefix cache before a completed step has written them."""

    def at(self, index: int) -> Block:
        return self.blocks[index - self.first]


NOT_KEPT = -1
"""Stands in a row's table for boundaries whose states are not kept."""


@dataclass(slots=True, eq=False)
class Fold:
    """A state: that of a sequence's first `boundary` blocks."""

    boundary: int
    block: Block
    num_tokens: int
    """Number of tokens that the sequence has computed when it is written."""
    unwritten: bool = False
    """Whether it is in the prefix cache and no completed step has written it."""


@dataclass(slots=True, eq=False)
class StateTable:
    """A sequence's states that it may still resume from, with rising boundaries."""

    folds: list[Fold] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Boundaries behind which others may resume, rising."""
    num_opened: int = 0
    """Number of the last folds that the step being planned writes."""
    source: Fold | None = None
    """The state that the step being planned reads, if it folds."""
    is_trusted: bool = True
    """Whether its states may be put into the prefix cache."""
    runs: bool = False
    """Whether a step was planned with it: then it needs a block of its own."""

    @property
    def boundary(self) -> int:
        """Boundary of its newest state once all planned steps have run."""
        return self.folds[-1].boundary if self.folds else 0

    def held(self) -> tuple[int, list[int]]:
        """Return the index of its first block, and the ids from there on, with `NOT_KEPT` where it has none."""
        kept = {fold.boundary - 1: fold.block.block_id for fold in self.folds}
        if self.source is not None:
            kept[self.source.boundary - 1] = self.source.block.block_id
        first = min(kept, default=0)
        return first, [kept.get(index, NOT_KEPT) for index in range(first, max(kept, default=-1) + 1)]


@dataclass(slots=True)
class BlockTable:
    sequence: CachedSequence
    of_kinds: list[KindTable]
    """Of all kinds but states."""
    end: int
    """Index behind the last block, the same in all kinds."""
    state: StateTable | None = None
    """Set for models with recurrent layers."""
    num_open_tokens: int = 0
    """Number of tokens that the step being planned writes."""
    num_launched_tokens: int = 0
    """Number of tokens that steps in flight write: the last ones of `num_computed_tokens`."""
    num_registered: int = 0
    """Number of leading blocks that were offered to the prefix cache or came from it."""
    tail_is_own: bool = False
    """Whether no other sequence reads the last block of any kind, none is in the prefix cache unless it is full, and no
    state is due before the table's end."""
    has_unwritten: bool = False
    num_spare: int = 0
    """Most blocks at the end that no token needs so far: proposed tokens were withdrawn from them."""

    def mark_written(self, num_full: int) -> None:
        """Count the first `num_full` blocks as written by a completed step."""
        self.has_unwritten = False
        for own in self.of_kinds:
            if own.unwritten and own.unwritten[-1] < num_full:  # indices rise
                own.unwritten.clear()
            elif own.unwritten:
                own.unwritten = [index for index in own.unwritten if index >= num_full]
                self.has_unwritten = True


WORTH_WAITING_TOKENS = 64
"""A sequence starts a step later if it can then resume behind so many more tokens."""


class Match(NamedTuple):
    """A prefix hit."""

    num_tokens: int
    blocks: Sequence[Sequence[Block]]
    """By kind, the cached blocks that are still needed behind `num_tokens` tokens; empty without a hit."""
    num_shared: int = 0
    """Tokens behind which the sequence could resume if there were a state."""
    num_soon: int = 0
    """Tokens behind which it can resume once the step being planned was launched, if that writes a state."""

    @property
    def grows_soon(self) -> bool:
        """Whether the sequence had better start a step later."""
        return self.num_soon >= self.num_tokens + WORTH_WAITING_TOKENS


NO_MATCH = Match(0, ())


class KindAllocation(NamedTuple):
    new_block_ids: list[int]
    """Ids of the blocks appended to the table."""
    replaced: tuple[int, int, int] | None = None
    """Copy-on-write: (index in the table, source block id, new block id)."""
    placed: Sequence[tuple[int, int]] = ()
    """States that the step writes: (index in the table, block id)."""


Allocation = Sequence[KindAllocation]
"""One entry per kind; none if nothing changed."""

NO_NEW_BLOCKS: Allocation = ()
"""The result of nearly every decode: its token goes into blocks that the sequence has."""


class KindUsage(NamedTuple):
    """The blocks of one kind."""

    kind: CacheKind
    num_blocks: int
    num_free: int
    """Blocks that can be allocated now, including cached ones."""
    num_evictable: int
    """Free blocks with cached content."""

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free


class KVUsage(NamedTuple):
    allocated_slots: int
    used_slots: int

    @property
    def waste(self) -> float:
        """Share of allocated slots that contain no token."""
        return 1 - self.used_slots / self.allocated_slots if self.allocated_slots else 0.0


def misuse_error(table: BlockTable, num_tokens: int) -> KVCacheError:
    """Return the error of a write of `num_tokens` tokens that is already open or not due."""
    sequence = table.sequence
    if table.num_open_tokens:
        return KVCacheError(f"{sequence.request_id} is already being written by a step")
    due = len(sequence.token_ids) + sequence.num_pending_tokens - sequence.num_computed_tokens
    return KVCacheError(f"{sequence.request_id}: {num_tokens} tokens asked for, {due} are due")
