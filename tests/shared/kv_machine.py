"""A state machine and a random walk through allocate, append, fork, free, preempt, abort and fail of a cache manager.

A simulated device stores digests of prefixes in the slots of each cache kind. In every step, each row must read, in its
own slots, what its kinds' windows show of its own prefix, so that a leaked, doubly used, wrongly shared or too early
freed block is detected even if the counters agree. Up to two steps are in flight: the device has run them, but they
were not read, so their tokens are not known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pagemill_engine.kv.integrity import check_integrity
from pagemill_engine.kv.manager import CacheManager
from pagemill_protocol.report.cache_kinds import FULL, CacheKind

BLOCK_SIZE = 4
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
"""Only two token values, so that prefixes are often shared."""
MIXES: list[tuple[int | None, ...]] = [(None,), (None, 5), (None, 9), (None, 4, 7), (3,), (6, 1)]
"""Windows of the kinds; None: a full kind."""


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
    )
    def make(self, num_blocks: int, windows: tuple[int | None, ...], caching: bool) -> None:
        self.kinds = [FULL if window is None else CacheKind(f"window-{window}", window) for window in windows]
        counts = [num_blocks] * len(windows)
        self.kv = CacheManager(counts, BLOCK_SIZE, kinds=self.kinds, enable_prefix_caching=caching)
        self.slots: list[dict[int, int]] = [{} for _ in self.kinds]
        self.copies: dict[str, list[tuple[int, int, int]]] = {}
        self.num_rows = 0
        self.alive: list[Row] = []
        self.flights: list[tuple[dict[Row, int], set[Row]]] = []

    @rule(target=rows, token_ids=tokens)
    def start(self, token_ids: list[int]) -> Row:
        return self._begin(Row(self._name(), token_ids))

    @rule(row=rows, share=st.floats(0.1, 1.0))
    def allocate(self, row: Row, share: float) -> None:
        """Schedule some of the row's due tokens in the step that is being planned."""
        due = row.num_tokens - row.num_computed_tokens
        if row not in self.alive or row.open_tokens or due == 0:
            return
        num_tokens = max(1, round(due * share))
        before = self.kv.usage(), self.kv.held_blocks(row)
        allocation = self.kv.allocate(row, num_tokens)
        if allocation is None:
            assert (self.kv.usage(), self.kv.held_blocks(row)) == before
            return
        row.open_tokens = num_tokens
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
        copies = [each for found in self.copies.values() for each in found]
        content = [(kind, copy, self._read(kind, source)) for kind, source, copy in copies]
        for kind, copy, values in content:
            self._write(kind, copy, values)
        self.copies.clear()
        written: set[tuple[int, int]] = set()
        flight = {row: row.open_tokens for row in self.alive if row.open_tokens}
        for row, num_tokens in flight.items():
            wanted = digests(row.token_ids + row.coming)
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                for kind, slots in enumerate(self.slots):
                    slot = self._slot(kind, row, position)
                    assert (kind, slot) not in written, "two rows wrote one slot"
                    written.add((kind, slot))
                    slots[slot] = wanted[position]
        starts = {row: row.num_computed_tokens for row in flight}
        self.kv.launch([row.request_id for row in flight])
        for row in flight:
            row.open_tokens = 0
            row.has_run = True
            wanted = digests(row.token_ids + row.coming)
            for kind, slots in enumerate(self.slots):
                window = self.kinds[kind].window
                first = 0 if window is None else max(0, starts[row] - window + 1)
                for position in range(first, row.num_computed_tokens):
                    assert slots.get(self._slot(kind, row, position)) == wanted[position], (
                        "a row read the KV of another prefix"
                    )
        sampling = {row for row in flight if row.num_computed_tokens == row.num_tokens}
        for row in sampling:
            row.coming.append(digests(row.token_ids + row.coming)[-1] % 2)
            row.num_pending_tokens += 1
        self.flights.append((flight, sampling))

    @rule()
    def read_step(self) -> None:
        if not self.flights:
            return
        flight, sampling = self.flights.pop(0)
        for row, num_tokens in flight.items():
            self.kv.commit(row, num_tokens)
        for row in sampling:
            row.token_ids.append(row.coming.pop(0))
            row.num_pending_tokens -= 1

    @rule(target=rows, parent=rows)
    def fork(self, parent: Row) -> Any:
        written = parent.open_tokens or any(parent in flight for flight, _ in self.flights)
        if parent not in self.alive or written or not parent.has_run or parent.num_computed_tokens < 2:
            return multiple()
        child = Row(self._name(), list(parent.token_ids))
        if self.kv.fork(parent, child, parent.num_computed_tokens - 1) == 0:
            assert not self.kv.has_table(child)
            return self._begin(child)
        self.alive.append(child)
        return child

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
        self.kv.start(row, self.kv.match(row))
        assert row.num_computed_tokens < len(row.token_ids)
        self.alive.append(row)
        return row

    def _drop(self, row: Row) -> None:
        self.kv.free(row)
        self.copies.pop(row.request_id, None)
        row.open_tokens = row.num_pending_tokens = 0
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
        return [self.slots[kind].get(block_id * BLOCK_SIZE + offset) for offset in range(BLOCK_SIZE)]

    def _write(self, kind: int, block_id: int, values: list[int | None]) -> None:
        for offset, value in enumerate(values):
            if value is not None:
                self.slots[kind][block_id * BLOCK_SIZE + offset] = value


def walk(seed: int, num_steps: int = 250) -> None:
    """Take random steps that are likely to share, fill and overlap; the state machine searches more evenly."""
    draw = random.Random(seed)
    machine = KVMachine()
    machine.make(num_blocks=draw.randint(4, 16), windows=draw.choice(MIXES), caching=draw.random() < 0.9)
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
