"""A state machine and a random walk through allocate, append, fork, free, preempt, abort and fail of a cache manager.

A simulated device stores digests of prefixes in the slots of each cache kind. In every step, each row must read, in its
own slots, what its kinds' windows show of its own prefix, so that a leaked, doubly used, wrongly shared or too early
freed block is detected even if the counters agree. A slot of states has the digest of a whole prefix, and each row a
log of the tokens since. Where memory moves between kinds, writing a block destroys what the other kind had in its
bytes, and the device's tables follow only what plans say. Up to two steps are in flight: the device has run them, but
they were not read, so their tokens are not known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pagemill_engine.kv.integrity import check_integrity
from pagemill_engine.kv.manager import CacheManager
from pagemill_execution.arena import end_of_ids
from pagemill_protocol.report.cache_kinds import FULL, CacheKind

BLOCK_SIZE = 4
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
"""Only two token values, so that prefixes are often shared."""
Rule = int | None | Literal["state"]
MIXES: list[tuple[Rule, ...]] = [
    (None,),
    (None, 5),
    (None, 9),
    (None, 4, 7),
    (3,),
    (6, 1),
    (None, "state"),
    ("state",),
    (None, 5, "state"),
    (4, "state"),
    (None, 9, 3, "state"),
]
"""Windows of the kinds; None: a full kind."""


def kind_of(rule: Rule) -> CacheKind:
    if rule == "state":
        return CacheKind("state", state=True)
    return FULL if rule is None else CacheKind(f"window-{rule}", rule)


@dataclass(eq=False)
class Row:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    cache_root: bytes = b"root"
    block_hashes: list[bytes] = field(default_factory=list)
    num_pending_tokens: int = 0
    open_tokens: int = 0
    has_run: bool = False
    """Whether a step was launched with it since it started: only then does the scheduler fork from it."""
    coming: list[int] = field(default_factory=list)
    """The tokens that steps in flight have sampled."""
    proposed: list[int] = field(default_factory=list)
    """Tokens that are computed behind its own in the step being planned."""
    boundary: int = 0
    """Blocks before the newest state that the device has of it, in `slot`."""
    slot: int = -1
    log_end: int = 0
    """Tokens behind the last one in its log."""
    placed: list[tuple[int, int]] = field(default_factory=list)
    """States that the step being planned writes: index and slot."""
    tables: list[list[int | None]] = field(default_factory=list)
    """Of each kind of vectors, the ids of blocks as the device knows them."""
    is_known: bool = False
    """Whether the device, or the step being planned, has the row."""
    allocation: Any = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens


def digests(token_ids: list[int]) -> list[int]:
    out, digest = [], 0
    for token_id in token_ids:
        digest = hash((digest, token_id))
        out.append(digest)
    return out


class KVMachine(RuleBasedStateMachine):
    rows = Bundle("rows")

    @initialize(
        num_blocks=st.integers(3, 12),
        windows=st.sampled_from(MIXES),
        caching=st.booleans(),
        sizes=st.sampled_from([(), (2, 2), (1, 5), (7, 2)]),
    )
    def make(self, num_blocks: int, windows: tuple[Rule, ...], caching: bool, sizes: tuple[int, ...] = ()) -> None:
        """`sizes`: bytes of a block of the first and the last kind, between which memory moves; none: it does not."""
        self.kinds = [kind_of(window) for window in windows]
        self.moves = len(sizes) > 0 and len(windows) > 1
        if self.moves:
            for number, size in zip((0, -1), sizes, strict=True):
                self.kinds[number] = msgspec.structs.replace(self.kinds[number], block_bytes=size)
        self.num_vectors = len(self.kinds) - self.kinds[-1].state
        counts = [num_blocks] * len(windows)
        self.kv = CacheManager(
            counts, BLOCK_SIZE, kinds=self.kinds, enable_prefix_caching=caching, shares_memory=self.moves
        )
        self.counts = counts
        self.slots: list[dict[int, int]] = [{} for _ in range(self.num_vectors)]
        self.states: dict[int, int | None] = {}
        self.copies: dict[str, list[tuple[int, int, int]]] = {}
        self.num_rows = 0
        self.alive: list[Row] = []
        self.flights: list[tuple[dict[Row, int], set[Row]]] = []
        self.accepted: dict[Row, tuple[int, list[int]]] = {}
        """Rows in flight with proposed tokens: how many, and what they sampled."""

    @rule(target=rows, token_ids=tokens)
    def start(self, token_ids: list[int]) -> Row:
        return self._begin(Row(self._name(), token_ids))

    @rule(row=rows, share=st.floats(0.1, 1.0))
    def allocate(self, row: Row, share: float) -> None:
        """Schedule some of the row's due tokens in the step that is being planned."""
        due = row.num_tokens - row.num_computed_tokens
        if row not in self.alive or row.open_tokens or row in self.accepted or due == 0:
            return
        num_tokens = max(1, round(due * share))
        before = self.kv.usage(), self.kv.held_blocks(row)
        allocation = self.kv.allocate(row, num_tokens)
        if allocation is None:
            assert (self.kv.usage(), self.kv.held_blocks(row)) == before
            return
        self._open(row, num_tokens, allocation)

    @rule(row=rows, num_proposed=st.integers(1, 6), num_right=st.integers(0, 6))
    def propose(self, row: Row, num_proposed: int, num_right: int) -> None:
        """Schedule a row's last token with proposed ones, some of which it will sample."""
        if row not in self.alive or row.open_tokens or row.num_pending_tokens:
            return
        if row.num_tokens - row.num_computed_tokens != 1 or any(row in flight for flight, _ in self.flights):
            return
        true: list[int] = []
        while len(true) < num_proposed:
            true.append(digests(row.token_ids + true)[-1] % 2)
        row.proposed = [*true[:num_right], *(1 - token for token in true[num_right:])]
        allocation = self.kv.allocate(row, 1 + num_proposed, num_proposed)
        if allocation is None:
            row.proposed = []
            return
        row.num_pending_tokens = num_proposed
        self._open(row, 1 + num_proposed, allocation)

    def _open(self, row: Row, num_tokens: int, allocation: Any) -> None:
        row.open_tokens = num_tokens
        row.allocation = allocation
        if not row.is_known:
            held = self.kv.held_blocks(row)
            row.tables = [[None] * first + ids for first, ids in held[: self.num_vectors]]
            row.is_known, row.allocation = True, ()
            if row.boundary:
                first, ids = held[-1]
                row.slot = ids[row.boundary - 1 - first]
        row.placed = [entry for part in allocation for entry in part.placed]
        copies = [(kind, *part.replaced[1:]) for kind, part in enumerate(allocation) if part.replaced is not None]
        if copies:
            self.copies[row.request_id] = copies

    @rule()
    def launch_step(self) -> None:
        """Run the step on the device: copies are read first, then rows write, then every row must read its own prefix.

        Rows whose tokens are all computed then sample a token.
        """
        if len(self.flights) == 2:
            return
        copies = [each for found in self.copies.values() for each in found] + self._move()
        content = [(kind, copy, self._read(kind, source)) for kind, source, copy in copies]
        for kind, copy, values in content:
            self._write(kind, copy, values)
        self.copies.clear()
        written: set[tuple[int, int]] = set()
        flight = {row: row.open_tokens for row in self.alive if row.open_tokens}
        for row, num_tokens in flight.items():
            wanted = digests(row.token_ids + row.coming + row.proposed)
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                for kind, slots in enumerate(self.slots):
                    slot = self._slot(kind, row, position)
                    assert (kind, slot) not in written, "two rows wrote one slot"
                    written.add((kind, slot))
                    self._destroy(kind, slot // BLOCK_SIZE)
                    slots[slot] = wanted[position]
        if self.num_vectors < len(self.kinds):
            self._fold(flight)
        starts = {row: row.num_computed_tokens for row in flight}
        self.kv.launch([row.request_id for row in flight])
        for row in flight:
            row.open_tokens = 0
            row.has_run = True
            wanted = digests(row.token_ids + row.coming + row.proposed)
            for kind, slots in enumerate(self.slots):
                window = self.kinds[kind].window
                first = 0 if window is None else max(0, starts[row] - window + 1)
                for position in range(first, row.num_computed_tokens):
                    assert slots.get(self._slot(kind, row, position)) == wanted[position], (
                        "a row read the KV of another prefix"
                    )
        sampling = {row for row in flight if row.num_computed_tokens == row.num_tokens}
        for row in sampling:
            if row.proposed:
                sampled: list[int] = []
                while sampled == row.proposed[: len(sampled)] and len(sampled) <= len(row.proposed):
                    sampled.append(digests(row.token_ids + sampled)[-1] % 2)
                self.accepted[row] = (len(row.proposed), sampled)
                row.num_pending_tokens += 1
                row.proposed = []
                continue
            row.coming.append(digests(row.token_ids + row.coming)[-1] % 2)
            row.num_pending_tokens += 1
        self.flights.append((flight, sampling))

    def _move(self) -> list[tuple[int, int, int]]:
        """Change the device's tables as the step's plan says, and return the copies of moved blocks."""
        for row in self.alive:
            for table, part in zip(row.tables, row.allocation, strict=False):
                table += part.new_block_ids
                if part.replaced is not None:
                    table[part.replaced[0]] = part.replaced[2]
            row.allocation = ()
        moves = self.kv.take_moves()
        by_id = {row.request_id: row for row in self.alive if row.is_known}
        for kind, moved in enumerate(moves):
            for name, index, block_id in moved.placed:
                row = by_id.get(name)
                if row is None:
                    continue
                if kind < self.num_vectors:
                    row.tables[kind][index] = block_id
                elif index == row.boundary - 1:
                    row.slot = block_id
        for row in by_id.values():
            for table, (first, ids) in zip(row.tables, self.kv.held_blocks(row), strict=False):
                assert table[first:] == ids, "the device has another table"
        return [(kind, *pair) for kind, moved in enumerate(moves) for pair in moved.copies]

    def _destroy(self, kind: int, block_id: int) -> None:
        """Destroy what the other kind has in a block's bytes."""
        if not self.moves:
            return
        for other_kind, other in overlapped(self.kinds, self.counts, kind, block_id):
            if other_kind == self.num_vectors:
                self.states.pop(other, None)
            else:
                for offset in range(BLOCK_SIZE):
                    self.slots[other_kind].pop(other * BLOCK_SIZE + offset, None)

    @rule()
    def read_step(self) -> None:
        if not self.flights:
            return
        flight, sampling = self.flights.pop(0)
        for row, num_tokens in flight.items():
            if row not in self.accepted:
                self.kv.commit(row, num_tokens)
                continue
            num_proposed, sampled = self.accepted.pop(row)
            sampling.discard(row)
            self.kv.withdraw(row, 1 + num_proposed - len(sampled))
            row.log_end = row.num_computed_tokens
            row.num_pending_tokens = 0
            for token in sampled:
                self.kv.commit(row, 1)
                row.token_ids.append(token)
        for row in sampling:
            row.token_ids.append(row.coming.pop(0))
            row.num_pending_tokens -= 1

    @rule(target=rows, parent=rows)
    def fork(self, parent: Row) -> Any:
        written = parent.open_tokens or any(parent in flight for flight, _ in self.flights)
        if parent not in self.alive or written or not parent.has_run or parent.num_computed_tokens < 2:
            return multiple()
        child = Row(self._name(), list(parent.token_ids))
        resumed = self.kv.fork(parent, child, parent.num_computed_tokens - 1)
        if resumed == 0:
            assert not self.kv.has_table(child)
            return self._begin(child)
        assert child.num_computed_tokens == resumed
        self._admit(child)
        self.alive.append(child)
        return child

    @rule(row=rows)
    def leave_and_return(self, row: Row) -> None:
        """Let a row leave the batch with its blocks, as beams do. The device forgets it."""
        written = row.open_tokens or any(row in flight for flight, _ in self.flights)
        if row not in self.alive or written or not row.has_run:
            return
        self.kv.rewind(row)
        if self.kv.has_table(row):
            self._admit(row)
        else:
            self.alive.remove(row)
            self._begin(row)

    @rule(row=consumes(rows))
    def finish(self, row: Row) -> None:
        if row in self.alive and not row.open_tokens:
            self._drop(row)

    @rule(row=rows)
    def preempt(self, row: Row) -> None:
        """Preempt the row: its computed tokens are dropped, and it starts again with what is still cached."""
        if row in self.alive and not row.open_tokens:
            self._drop(row)
            self._begin(row)

    @rule(row=consumes(rows))
    def abort_or_fail(self, row: Row) -> None:
        """Remove the row while its write is planned or in flight; rows that hit its blocks start again."""
        if row not in self.alive:
            return
        untrusted = self.kv.invalidate(row)
        self._drop(row)
        while spoiled := [other for other in self.alive if self.kv.holds_any(other, untrusted)]:
            for other in spoiled:
                untrusted |= self.kv.invalidate(other)
                self._drop(other)

    @rule()
    def reset_cache_between_steps(self) -> None:
        if not self.flights and not any(row.open_tokens for row in self.alive):
            self.kv.reset_prefix_cache()

    @invariant()
    def bookkeeping_agrees(self) -> None:
        check_integrity(self.kv)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for row in list(self.alive):
            self._drop(row)
        check_integrity(self.kv)
        assert all(each.num_active == 0 for each in self.kv.usage()), "a block was leaked"

    def _begin(self, row: Row) -> Row:
        match = self.kv.match(row)
        needs = self.kv.needs_to_start(row, match, len(row.token_ids))
        reserved = [(len(self.alive) + number) % 3 for number in range(len(self.kinds))]
        self.kv.has_room(needs, reserved, len(self.alive) or None)
        self.kv.start(row, match, (len(row.token_ids) // 2,))
        assert row.num_computed_tokens < len(row.token_ids)
        self._admit(row)
        self.alive.append(row)
        return row

    def _admit(self, row: Row) -> None:
        """Let the device know a row: its log is empty."""
        first, ids = self.kv.held_blocks(row)[-1] if self.num_vectors < len(self.kinds) else (0, [])
        row.boundary, row.slot = (first + 1, ids[0]) if ids else (0, -1)
        row.log_end = BLOCK_SIZE * row.boundary
        row.tables, row.allocation, row.is_known = [], (), False

    def _fold(self, flight: dict[Row, int]) -> None:
        """Read the states of all rows, then write those that the step completes."""
        writes: dict[int, int] = {}
        for row, num_tokens in flight.items():
            wanted = digests(row.token_ids + row.coming + row.proposed)
            assert row.log_end == row.num_computed_tokens, "a row's log lacks tokens since its state"
            if row.boundary:
                assert self.states.get(row.slot) == wanted[row.boundary * BLOCK_SIZE - 1], "a foreign state was read"
            row.log_end += num_tokens
            last = (row.log_end - len(row.proposed)) // BLOCK_SIZE
            for index, slot in row.placed:
                assert row.boundary <= index < last, "a state was planned of tokens that the log does not have"
                assert slot not in writes, "two rows wrote one state"
                writes[slot] = wanted[(index + 1) * BLOCK_SIZE - 1]
        for row in flight:
            assert not any(row.slot == slot for other in flight if other is not row for _, slot in other.placed), (
                "a row wrote a state that another one reads"
            )
        for row in flight:
            if row.placed:
                row.boundary, row.slot = row.placed[-1][0] + 1, row.placed[-1][1]
            row.placed = []
            assert row.boundary == (row.log_end - len(row.proposed)) // BLOCK_SIZE, "a state is due"
        for slot in writes:
            self._destroy(len(self.kinds) - 1, slot)
        self.states |= writes

    def _drop(self, row: Row) -> None:
        self.kv.free(row)
        self.copies.pop(row.request_id, None)
        row.open_tokens = row.num_pending_tokens = 0
        row.placed, row.proposed = [], []
        row.tables, row.allocation, row.is_known = [], (), False
        self.accepted.pop(row, None)
        row.has_run = False
        row.coming.clear()
        for flight, sampling in self.flights:
            flight.pop(row, None)
            sampling.discard(row)
        self.alive.remove(row)

    def _name(self) -> str:
        self.num_rows += 1
        return f"row-{self.num_rows}"

    def _slot(self, kind: int, row: Row, position: int) -> int:
        first, block_ids = self.kv.held_blocks(row)[kind]
        index = position // BLOCK_SIZE - first
        assert index >= 0, "a block was freed that a row still reads"
        return block_ids[index] * BLOCK_SIZE + position % BLOCK_SIZE

    def _read(self, kind: int, block_id: int) -> list[int | None]:
        if kind == self.num_vectors:
            return [self.states.get(block_id)]
        return [self.slots[kind].get(block_id * BLOCK_SIZE + offset) for offset in range(BLOCK_SIZE)]

    def _write(self, kind: int, block_id: int, values: list[int | None]) -> None:
        self._destroy(kind, block_id)
        if kind == self.num_vectors:
            (self.states[block_id],) = values
            return
        for offset, value in enumerate(values):
            if value is not None:
                self.slots[kind][block_id * BLOCK_SIZE + offset] = value


def overlapped(
    kinds: Sequence[CacheKind], counts: Sequence[int], kind: int, block_id: int
) -> Iterator[tuple[int, int]]:
    """Yield the blocks (kind, id) of the other kind whose bytes a block has, if its kind shares memory.

    `counts`: blocks of the kinds at the start. Blocks of the first kind count from the low end of the memory, those of
    the last one end at its high end.
    """
    last = len(kinds) - 1
    if kind not in (0, last):
        return
    low, high = kinds[0].block_bytes, kinds[-1].block_bytes
    total, end_id = counts[0] * low + counts[-1] * high, end_of_ids(kinds, counts)
    if kind == 0:
        start, end = block_id * low, (block_id + 1) * low
        others = range(end_id - -(-(total - start) // high), end_id - (total - end) // high)
    else:
        end = total - (end_id - 1 - block_id) * high
        others = range((end - high) // low, -(-end // low))
    for other in others:
        yield last - kind, other


def walk(seed: int, num_steps: int = 250) -> None:
    """Take random steps that are likely to share, fill and overlap; the state machine searches more evenly."""
    draw = random.Random(seed)
    machine = KVMachine()
    sizes = random.Random(seed).choice([(), (2, 2), (1, 5), (7, 2)])
    machine.make(num_blocks=draw.randint(4, 16), windows=draw.choice(MIXES), caching=draw.random() < 0.9, sizes=sizes)
    shared = [draw.randint(0, 1) for _ in range(24)]
    for _ in range(num_steps):
        row = draw.choice(machine.alive) if machine.alive else None
        action = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if row is None or (action == "start" and len(machine.alive) < 5):
            tokens = shared[: draw.randint(0, 20)] + [draw.randint(0, 1) for _ in range(draw.randint(1, 5))]
            machine.start(token_ids=tokens)
        elif action == "step":
            for each in machine.alive:
                if draw.random() < 0.8:
                    machine.allocate(row=each, share=draw.choice([0.3, 0.6, 1.0]))
                    machine.bookkeeping_agrees()
            machine.launch_step()
        elif action == "read":
            machine.read_step()
        elif action == "propose":
            machine.propose(row=row, num_proposed=draw.randint(1, 6), num_right=draw.randint(0, 6))
        elif action == "leave":
            machine.leave_and_return(row=row)
        elif action == "fork" and len(machine.alive) < 6:
            machine.fork(parent=row)
        elif action == "finish":
            machine.finish(row=row)
        elif action == "preempt":
            machine.preempt(row=row)
        elif action == "fail":
            machine.abort_or_fail(row=row)
        elif action == "reset":
            machine.reset_cache_between_steps()
        machine.bookkeeping_agrees()
    machine.teardown()


WEIGHTS = {"start": 5, "step": 12, "read": 11, "fork": 3, "finish": 2, "preempt": 2, "fail": 1, "reset": 0.1}
WEIGHTS |= {"propose": 4, "leave": 1}
