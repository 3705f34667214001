"""The process of a rank that follows: loads its shard, says that it is ready, and runs what rank 0 sends.

Rank 0 starts it (`runners.ranks.processes`). It ends when rank 0 closes the ring or ends itself.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pagemill_execution.runners.ranks.follower import follow
from pagemill_execution.runners.ranks.identity import RankIdentity, RankReport, encode_report
from pagemill_execution.starting.load_ranks import SLOT_BYTES, SLOTS, follower_of, settings_from
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.ring import RingReader, ring_bytes
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup, group_bytes
from pagemill_servers.process import logs
from pagemill_servers.process.malloc import trim_heap


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    with _reported():
        settings = settings_from(sys.stdin.buffer.read())
    logs.configure(logging.WARNING, process=f"rank {settings.rank}")
    end_with(settings.parent)
    size, capacity = settings.size, settings.capacity
    members = size // len(settings.stages)
    memory = SharedMemory(settings.group_file, group_bytes(size, capacity, members))
    group = SharedMemoryGroup(memory, settings.rank, size, capacity, settings.stuck_seconds, members)
    messages = SharedMemory(settings.ring_file, ring_bytes(SLOTS, SLOT_BYTES))
    ring = RingReader(messages, SLOTS, SLOT_BYTES, settings.rank - 1)
    with _reported():
        runner, followed = follower_of(settings, group, lambda line: _say(f"{' '.join(line.split())}\n".encode()))
    trim_heap()
    _say(encode_report(RankReport(RankIdentity.own(runner.info.weights_digest), runner.info.weight_bytes)))
    follow(runner, ring, followed)


@contextmanager
def _reported() -> Iterator[None]:
    """Tell rank 0 why this rank cannot start."""
    try:
        yield
    except Exception as error:
        _say(encode_report(RankReport(RankIdentity.own(), error=f"{type(error).__name__}: {error}")))
        raise


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def end_with(parent: int) -> None:
    """End when the parent ends, wherever this process waits."""

    def wait() -> None:
        with suppress(ProcessLookupError):
            file = os.pidfd_open(parent)
            if os.getppid() == parent:  # else it has ended, and another process has its id
                select.select([file], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
