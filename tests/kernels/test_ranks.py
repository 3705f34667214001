"""Groups of ranks add in order, exchange what differs in size, and end for all; rings give readers every message."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from in_process_ranks import in_process_groups
from rank_threads import together
from tcp_ranks import tcp_groups
from waiting import SOON_S, wait_until

from pagemill_kernels.cpu import library
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.places import PLAN
from pagemill_kernels.ranks.ring import ReaderStoppedError, RingClosedError, RingReader, RingWriter, ring_bytes
from pagemill_kernels.ranks.shared_logits import SharedLogits, logits_bytes
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup, group_bytes

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
CAPACITY = 64
KINDS = ["in process", pytest.param("shared memory", marks=needs_kernels), "tcp"]
BETWEEN_PROCESSES = KINDS[1:]
Groups = Callable[..., list[Any]]


@pytest.fixture
def groups_of() -> Iterator[Groups]:
    memories: list[SharedMemory] = []
    signals: list[Any] = []

    def made(kind: str, size: int, stuck_seconds: float = 30.0, members: int | None = None) -> list[Any]:
        if kind == "in process":
            return list(in_process_groups(size))
        if kind == "tcp":
            groups, own = tcp_groups(size, stuck_seconds, members)
            signals.extend(own)
            return groups
        memories.append(SharedMemory.create(group_bytes(size, CAPACITY, members)))
        return [SharedMemoryGroup(memories[-1], rank, size, CAPACITY, stuck_seconds, members) for rank in range(size)]

    yield made
    for each in signals:
        each.let_end()
    for each in signals:
        each.close()
        each._group.close()
    for memory in memories:
        memory.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_sums_in_the_order_of_ranks(groups_of: Groups, kind: str, size: int) -> None:
    rounds = [
        np.random.default_rng(seed).standard_normal((size, 1 + seed * 37 % 200), np.float32) for seed in range(40)
    ]

    def run(group: Any) -> list[Any]:
        found = []
        for values in rounds:
            own = values[group.rank].copy()
            group.all_reduce(own)
            found.append(own)
        return found

    for found in together(groups_of(kind, size), run):
        for mine, values in zip(found, rounds, strict=True):
            expected = values[0].copy()
            for other in values[1:]:
                expected += other
            assert np.array_equal(mine, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_values_may_differ_in_size(groups_of: Groups, kind: str) -> None:
    def run(group: Any) -> list[Any]:
        own = np.full((3, 5 + 40 * group.rank), group.rank, dtype=np.float32)
        return [[each.copy() for each in group.gather(own + turn)] for turn in range(5)]

    for found in together(groups_of(kind, 3), run):
        for turn, gathered in enumerate(found):
            assert [each.shape for each in gathered] == [(3, 5), (3, 45), (3, 85)]
            assert all((each == rank + turn).all() for rank, each in enumerate(gathered))


@needs_kernels
def test_logits_of_all_ranks_stand_in_one_array_until_the_next_ones_are_written(groups_of: Groups) -> None:
    """A rank that reads takes its time; the others may not write over what it reads."""
    vocab_size, columns = 11, [(0, 4), (4, 8), (8, 11)]
    memory = SharedMemory.create(logits_bytes(3, vocab_size))

    def run(group: Any) -> list[Any]:
        shared = SharedLogits(memory, group, vocab_size, columns[group.rank])
        found = []
        for turn in range(20):
            own = shared.own(1 + turn % 3)
            own[...] = 100 * turn + group.rank
            whole = shared.whole(1 + turn % 3)
            before = whole.copy()
            time.sleep(0.002 if group.rank == 0 else 0)
            assert np.array_equal(whole, before)
            found.append(before)
        return found

    for found in together(groups_of("shared memory", 3), run):
        for turn, logits in enumerate(found):
            expected = 100 * turn + np.repeat([0, 1, 2], [4, 4, 3])
            assert np.array_equal(logits, np.tile(expected, (1 + turn % 3, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_sent_in_order(groups_of: Groups, kind: str) -> None:
    sent = [np.random.default_rng(seed).standard_normal(1 + 50 * seed, np.float32) for seed in range(8)]

    def run(group: Any) -> list[Any]:
        found = []
        for values in sent:
            if group.rank == 0:
                group.send(values, 1)
            else:
                found.append(np.empty_like(values))
                group.receive(found[-1], 0)
        return found

    _, received = together(groups_of(kind, 2, members=1), run)
    assert all(np.array_equal(mine, values) for mine, values in zip(received, sent, strict=True))


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
@pytest.mark.parametrize("exchange", ["sums", "stages"])
def test_the_time_of_a_rank_is_without_its_waits(groups_of: Groups, kind: str, exchange: str) -> None:
    """Rank 1 computes for a while in each round; rank 0 computes nothing and waits for it."""
    values, rounds, least_s = np.linspace(0, 1, 300_000), 8, 0.1

    def run(group: Any) -> None:
        own = np.ones(4, dtype=np.float32)
        for _ in range(rounds):
            began, waited = time.monotonic(), group.waited_s
            while group.rank == 1 and time.monotonic() < began + least_s:
                np.sin(values)
            if exchange == "sums":
                group.all_reduce(own)
            elif group.rank == 1:
                group.send(own, 0)
            else:
                group.receive(own, 1)
            group.add_computed(time.monotonic() - began - (group.waited_s - waited), 1)

    ratios: list[float] = []
    while len(ratios) < 5 and min(ratios, default=1.0) >= 0.5:  # rank 0 may wait for a processor on a busy machine
        groups = groups_of(kind, 2, members=1 if exchange == "stages" else 2)
        together(groups, run)
        wait_until(lambda: all(each.steps >= rounds for each in groups[0].computed()))  # noqa: B023
        quick, slow = groups[0].computed()
        assert quick.steps == slow.steps == rounds
        assert slow.seconds >= rounds * least_s
        ratios.append(quick.seconds / slow.seconds)
    assert 0 < min(ratios) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_wakes_every_rank_with_the_first_reason(groups_of: Groups, kind: str) -> None:
    def run(group: Any) -> None:
        group.all_reduce(np.ones(4, dtype=np.float32))
        if group.rank == 2:
            group.abort("rank 2: out of memory")
            group.abort("a later reason")
        group.all_reduce(np.ones(4, dtype=np.float32))

    started = time.monotonic()
    for error in together(groups_of(kind, 3), run):
        assert isinstance(error, GroupAborted)
        assert str(error) == "rank 2: out of memory"
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_rank_that_does_not_come_is_named_with_step_and_cut(groups_of: Groups, kind: str) -> None:
    def run(group: Any) -> None:
        group.begin_step(7)
        group.all_reduce(np.ones(4, dtype=np.float32))
        if group.rank != 1:
            group.all_reduce(np.ones(4, dtype=np.float32))

    first, second, third = together(groups_of(kind, 3, stuck_seconds=1.5), run)
    assert second is None
    for error in (first, third):
        assert str(error).startswith("rank 1 has not reached a sum outside of the layers of step 7 within 1.5 s")


@pytest.mark.slow
@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_rank_that_waited_for_a_slow_one_has_its_own_time_from_then_on(groups_of: Groups, kind: str) -> None:
    """The first of three stages waits for a rank for longer than it may; no rank is at one place for so long."""
    stuck_seconds, values = 2.0, np.ones(4, dtype=np.float32)

    def run(group: Any) -> None:
        if group.rank == 2:
            for _ in range(10):
                group.come_to(PLAN)
                time.sleep(0.3)
            group.send(values, 1)
        elif group.rank == 1:
            group.receive(values.copy(), 2)
            time.sleep(0.2)
            group.send(values, 0)
        else:
            group.receive(values.copy(), 1)

    assert together(groups_of(kind, 3, stuck_seconds, members=1), run) == [None, None, None]


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_what_a_failed_step_leaves_on_its_way_is_no_part_of_the_next(groups_of: Groups, kind: str) -> None:
    """Two ranks have begun to exchange more than connections hold when the third one fails."""
    values, begun = np.arange(600_000 if kind == "tcp" else 600, dtype=np.float32), threading.Barrier(3)

    def run(group: Any) -> Any:
        found = []
        for turn in range(3):
            own = values + group.rank + turn
            group.begin_step(turn)
            try:
                if group.rank == 2:
                    group.abort(f"no memory at step {turn}")
                group.all_reduce(own)
            except GroupAborted as error:
                found.append(str(error))
            begun.wait(30)  # as the plan ring does
            group.reset() if group.rank == 0 else group.recover()
            begun.wait(30)
            own = values + group.rank + turn
            group.all_reduce(own)
            found.append(np.array_equal(own, 3 * values + 3 + 3 * turn))
        return found

    expected = [each for turn in range(3) for each in (f"no memory at step {turn}", True)]
    assert together(groups_of(kind, 3), run) == [expected] * 3


def test_a_rank_that_ends_is_named_to_all(groups_of: Groups) -> None:
    groups = groups_of("tcp", 3)

    def run(group: Any) -> None:
        group.all_reduce(np.ones(4, dtype=np.float32))
        if group.rank == 1:
            (connection,) = group.tell.__self__._connections.values()
            connection.shutdown(socket.SHUT_RDWR)
            for peer in group._peers.values():
                peer.connection.shutdown(socket.SHUT_RDWR)
        else:
            group.all_reduce(np.ones(4, dtype=np.float32))

    first, second, third = together(groups, run)
    assert second is None
    for error in (first, third):
        assert str(error).startswith(
            "rank 1 ended its connection; it was last at a sum outside of the layers of step 0"
        )
    assert groups[0].is_lost
    assert groups[2].is_lost


SLOTS, SLOT_BYTES = 8, 512


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, list[RingReader]]]:
    memory = SharedMemory.create(ring_bytes(SLOTS, SLOT_BYTES))
    names = ["rank 1", "rank 2", "rank 3"]
    yield (
        RingWriter(memory, SLOTS, SLOT_BYTES, names),
        [RingReader(memory, SLOTS, SLOT_BYTES, index) for index in range(len(names))],
    )
    memory.close()


@needs_kernels
@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.slow])])
def test_readers_that_stop_at_random_read_every_message(ring: tuple[RingWriter, list[RingReader]], count: int) -> None:
    writer, readers = ring
    sizes = random.Random(1)
    messages = [bytes([index % 251]) * int(sizes.choice((0, 1, 300, 512, 513, 2000, 9000))) for index in range(count)]
    wrong: list[int] = []

    def read(reader: RingReader, seed: int) -> None:
        stops = random.Random(seed)
        for index, message in enumerate(messages):
            if stops.random() < 0.002:
                time.sleep(0.002)  # the reader stops; nothing waits for this time
            if reader.read(30) != message:
                wrong.append(index)
                return

    threads = [threading.Thread(target=read, args=(reader, seed)) for seed, reader in enumerate(readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.write(message, seconds=30)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []


@needs_kernels
def test_a_reader_that_reads_nothing_is_named(ring: tuple[RingWriter, list[RingReader]]) -> None:
    writer, readers = ring
    for _ in range(SLOTS):
        writer.write(b"step", seconds=0.2)
        assert readers[0].read(1) == readers[2].read(1) == b"step"
    with pytest.raises(ReaderStoppedError, match=r"rank 2 has read nothing for 0\.2 s"):
        writer.write(b"step", seconds=0.2)


@needs_kernels
def test_a_closed_ring_is_read_to_its_end(ring: tuple[RingWriter, list[RingReader]]) -> None:
    writer, readers = ring
    assert readers[0].read(0.05) is None
    writer.write(b"last")
    writer.close()
    assert readers[1].read(1) == b"last"
    with pytest.raises(RingClosedError):
        readers[1].read(1)
    with pytest.raises(RingClosedError):
        writer.write(b"more")
