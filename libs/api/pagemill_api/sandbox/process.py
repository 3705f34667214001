"""The server's side of `template_worker` and of other workers of its kind: starts, calls and ends them.

Why a process: a template can spend unbounded time or memory inside one C call (`10 ** (10 ** 8)`, the text of a list of
twice a list of twice a list, forty deep), and so can a tokenizer's regular expression. Loop counters and `sys.settrace`
cannot interrupt that, and signal handlers run in the main thread only. A process with kernel timers and a memory limit
can always be ended, whichever thread waits for it. It costs about 0.2 ms per call and one start per model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_WORKER_FILE = Path(__file__).parents[1] / "text" / "template" / "template_worker.py"
_START_TIMEOUT_S = 60.0
_HEAD_BYTES = 4
_GRACE_S = 5.0
"""Seconds that this side waits in addition to the worker's own timers."""
_READ_BYTES = 1 << 20
MAX_INLINE_WRITE_BYTES = 32 * 1024
"""Maximum size of a request that can be written without blocking: half of a pipe's buffer."""


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    cpu_limit_s: float = 1.0
    wall_limit_s: float = 10.0
    max_output_chars: int = 16 * 1024 * 1024
    memory_bytes: int = 1024 * 1024 * 1024
    """Limit of the worker's address space."""


class TimeLimitReached(Exception):
    """The worker was ended by its timers."""


class WorkerDied(Exception):
    """The worker ended for another reason: killed, out of memory, or stack overflow."""


class ExchangeError(Exception):
    """An exchange on the event loop failed; `LimitedProcess.verdict` of `cause` returns the reason."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class LimitedProcess:
    """One running worker. Not thread-safe: its owner lends it to one thread at a time, or to an event loop."""

    def __init__(self, sources: dict[str, str], limits: ProcessLimits, worker: Path = _WORKER_FILE) -> None:
        """Start the worker. `sources`: the texts that it reads first, by name. `worker`: a script with the protocol of
        `template_worker`."""
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could contain text of a prompt
            bufsize=0,
            env={
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONUTF8": "1",
                "TOKENIZERS_PARALLELISM": "false",  # a confined process cannot start threads
            },
        )
        setup = msgspec.to_builtins(limits) | {"sources": sources}
        try:
            reply = self._exchange(msgspec.json.encode(setup), _START_TIMEOUT_S)
            self.errors: dict[str, str] = reply["errors"]
            self.plain: dict[str, list[Any]] = reply.get("plain", {})
            """Plain programs (`plain_program`) by name, of the templates that have one."""
        except BaseException:
            self.close()
            raise

    def call(self, name: str, variables: bytes) -> dict[str, Any]:
        """Return the worker's reply, a JSON object. `name`: of what it does, such as a template. `variables`: one, too.

        Raises `TimeLimitReached` or `WorkerDied`; the process has then ended.
        """
        return self._exchange(_request(name, variables), self._limits.wall_limit_s + _GRACE_S)

    def call_inline(
        self, name: str, variables: bytes, on_free: Callable[[], None], on_broken: Callable[[], None]
    ) -> asyncio.Future[dict[str, Any]]:
        """Call as `call`, on the running event loop without a thread. `variables` has at most
        `MAX_INLINE_WRITE_BYTES`.

        The future ends with the reply or with `ExchangeError`. The process is busy until then, even if the caller stops
        waiting: `on_free` or `on_broken` is called when it no longer is, before the future ends.
        """
        answered = asyncio.get_running_loop().create_future()
        _Reading(self, answered, on_free, on_broken).start(self._limits.wall_limit_s + _GRACE_S)
        with contextlib.suppress(OSError):  # the reader is notified
            self._write(_framed(_request(name, variables)))
        return answered

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def descriptor(self) -> int:
        """File descriptor of its replies."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            self._write(_framed(request))
            return _reply_of(self._read_frame(deadline))
        except (OSError, EOFError, TimeoutError) as error:
            raise self.verdict(error) from None

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _read_frame(self, deadline: float) -> bytes:
        """Read one frame with few system calls: each releases the interpreter's lock and waits for it."""
        descriptor = self.descriptor
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        incoming = _Incoming()
        while True:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            frame = incoming.add(os.read(descriptor, _READ_BYTES))
            if frame is not None:
                return frame

    def verdict(self, error: Exception) -> Exception:
        """Return why the exchange failed, and end the process; may block until it has ended."""
        ended_by_itself = isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError)
        if ended_by_itself:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        code = self._process.poll()
        self.close()
        if isinstance(error, TimeoutError) or code in (-signal.SIGALRM, -signal.SIGPROF):
            return TimeLimitReached()
        return WorkerDied(f"exit code {code}")


class _Incoming:
    """The bytes of one frame that have arrived."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._num_bytes = _HEAD_BYTES

    def add(self, piece: bytes) -> bytes | None:
        """Add bytes. Returns the frame once it is complete. Raises `EOFError` at the end of the stream."""
        if not piece:
            raise EOFError
        received = self._received
        received += piece
        if len(received) >= _HEAD_BYTES:
            self._num_bytes = _HEAD_BYTES + int.from_bytes(received[:_HEAD_BYTES], "big")
        return bytes(received[_HEAD_BYTES:]) if len(received) >= self._num_bytes else None


class _Reading:
    """Collects one reply as the event loop reports its pieces."""

    def __init__(
        self,
        process: LimitedProcess,
        answered: asyncio.Future[dict[str, Any]],
        on_free: Callable[[], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._process = process
        self._descriptor = process.descriptor
        self._answered = answered
        self._on_free = on_free
        self._on_broken = on_broken
        self._loop = answered.get_loop()
        self._incoming = _Incoming()
        self._timer: asyncio.TimerHandle

    def start(self, timeout_s: float) -> None:
        self._loop.add_reader(self._descriptor, self._read)
        self._timer = self._loop.call_later(timeout_s, self._fail, TimeoutError())

    def _read(self) -> None:
        try:
            frame = self._incoming.add(os.read(self._descriptor, _READ_BYTES))
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._fail(error)
            return
        if frame is None:
            return
        self._stop()
        self._on_free()
        if not self._answered.done():
            self._answered.set_result(_reply_of(frame))

    def _fail(self, error: Exception) -> None:
        self._stop()
        self._on_broken()
        if self._answered.done():
            self._loop.run_in_executor(None, self._process.close)
        else:
            self._answered.set_exception(ExchangeError(error))

    def _stop(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._descriptor)


def _reply_of(frame: bytes) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = msgspec.json.decode(frame)
    except msgspec.DecodeError:  # a lone surrogate is the only text that can be sent but not decoded
        return {"error": "what it makes is not valid Unicode"}
    return reply


def _request(name: str, variables: bytes) -> bytes:
    return b'{"name":%b,"variables":%b}' % (msgspec.json.encode(name), variables)


def _framed(request: bytes) -> bytes:
    return len(request).to_bytes(_HEAD_BYTES, "big") + request
