"""The sandbox of worker processes that run code of a client or of a model's author, and their protocol.

A process gives up opening files and starting processes and limits its memory; before each piece of work it arms kernel
timers with their default action, so that even a single C call that never returns ends the process. A frame is four
bytes of length (big-endian) and JSON. Standard library only; `process` is the server's side.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from typing import Any, BinaryIO


def enter_sandbox(memory_bytes: int) -> None:
    """Confine this process: timers end it, signals to the terminal's group do not; no files, no processes, limited
    memory."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))


@contextlib.contextmanager
def timed(cpu_limit_s: float, wall_limit_s: float) -> Iterator[None]:
    """End the process if the block takes longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    signal.setitimer(signal.ITIMER_REAL, wall_limit_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def read_frame(stream: BinaryIO) -> Any:
    """Return the next message, or None at the end of the input."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(int.from_bytes(head, "big")))


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    raw = json.dumps(message).encode()
    stream.write(len(raw).to_bytes(4, "big") + raw)
    stream.flush()
