"""The processes of followers, as rank 0 starts, watches and ends them.

Each is a child with its settings on standard input and its answer on standard output. A thread waits for their ends in
the kernel (pidfd) and ends the group at once when one ends by itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pagemill_execution.runners.ranks.identity import RankIdentity, check_same, decode_report
from pagemill_execution.runners.ranks.ranked import WatchedGroup
from pagemill_execution.weights.errors import LoadError

CLOSE_SECONDS = 10.0


class FollowerProcesses:
    def __init__(self, module: str, settings: Sequence[dict[str, Any]], files: Sequence[int]) -> None:
        """Start one process per entry of `settings`, for ranks from 1 on. `files`: descriptors that they inherit.

        `module`: the one that they run.
        """
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=tuple(files)
            )
            for _ in settings
        ]
        for process, own in zip(self._processes, settings, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(own).encode())
            process.stdin.close()

    @property
    def ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_until_ready(self, own: RankIdentity) -> int:
        """Wait until all have loaded their shards, and return the bytes of these. Raises `LoadError` with the message
        of one that cannot, or that differs from `own`, of rank 0."""
        num_bytes = 0
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            report = decode_report(process.stdout.readline())
            if report is not None:
                check_same(f"Rank {rank}", report.identity, own)
                num_bytes += report.num_bytes
            if report is None or report.error:
                said = f"it ended with {_ending(process.wait())}" if report is None else report.error
                raise LoadError("RankLost", f"Rank {rank} did not load its part of the model: {said}")
        return num_bytes

    def answers(self) -> list[str]:
        """Wait for a line of each process, and return these."""
        lines = []
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            line = process.stdout.readline()
            lines.append(line.decode(errors="replace").strip() if line else f"rank {rank} has ended.")
        return lines

    def watch(self, group: WatchedGroup) -> None:
        """End the group when a process ends by itself."""
        self._watcher = threading.Thread(target=self._watch, args=(group,), name="ranks", daemon=True)
        self._watcher.start()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
        self.close()

    def close(self) -> None:
        self._closing.set()
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self, group: WatchedGroup) -> None:
        for index in ends_of(self._processes):
            process, rank = self._processes[index], index + 1
            if not self._closing.is_set():
                ending = _ending(process.wait())
                group.lose(f"rank {rank} (process {process.pid}) ended with {ending}; it was last {group.place(rank)}")


def ends_of(processes: Sequence[subprocess.Popen[Any]]) -> Iterator[int]:
    """Yield the index of each process once it has ended."""
    poll = select.poll()
    indices = {os.pidfd_open(process.pid): index for index, process in enumerate(processes)}
    for file in indices:
        poll.register(file, select.POLLIN)
    while indices:
        for file, _ in poll.poll():
            poll.unregister(file)
            os.close(file)
            yield indices.pop(file)


def _ending(code: int) -> str:
    return f"the signal {signal.Signals(-code).name}" if code < 0 else f"the exit code {code}"
