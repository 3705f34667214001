"""The server's side of `template_worker`: starts it, talks to it, replaces it when it dies.

Why a process: a template can spend unbounded time or memory inside one C call (`10 ** (10 ** 8)`, the text of a list
of twice a list of twice a list, forty deep). Loop counters and `sys.settrace` cannot interrupt that, and signal
handlers run in the main thread only. A process with kernel timers and a memory limit can always be ended, whichever
thread waits for it. It costs about 0.2 ms per render and one start per model.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

_WORKER_FILE = Path(__file__).with_name("template_worker.py")
_START_TIMEOUT_S = 60.0
_HEAD_BYTES = 4
_GRACE_S = 5.0
"""How much later than the worker's own timers this side gives up."""


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    cpu_limit_s: float = 1.0
    wall_limit_s: float = 10.0
    max_output_chars: int = 16 * 1024 * 1024
    memory_bytes: int = 1024 * 1024 * 1024
    """Address space of the worker."""


class TimeLimitReached(Exception):
    """The worker was ended by its timers."""


class WorkerDied(Exception):
    """The worker ended for another reason: killed, out of memory, or its stack overflowed."""


class TemplateProcess:
    """One running worker. Not thread safe: its owner lends it to one thread at a time."""

    def __init__(self, templates: dict[str, str], limits: TemplateLimits) -> None:
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", str(_WORKER_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could hold text of a prompt
            bufsize=0,
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUTF8": "1"},
        )
        setup = msgspec.to_builtins(limits) | {"templates": templates}
        try:
            self.errors: dict[str, str] = self._exchange(msgspec.json.encode(setup), _START_TIMEOUT_S)["errors"]
        except BaseException:
            self.close()
            raise

    def render(self, template: str, variables: bytes) -> dict[str, Any]:
        """The worker's reply: `text`, `refusal` or `error`. `variables`: a JSON object.

        Raises `TimeLimitReached` or `WorkerDied`; the process is then gone.
        """
        request = b'{"template":%b,"variables":%b}' % (msgspec.json.encode(template), variables)
        return self._exchange(request, self._limits.wall_limit_s + _GRACE_S)

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
            self._write(len(request).to_bytes(_HEAD_BYTES, "big") + request)
            reply: dict[str, Any] = msgspec.json.decode(self._read_frame(deadline))
        except (OSError, EOFError, TimeoutError) as error:
            raise self._verdict(error) from None
        return reply

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _read_frame(self, deadline: float) -> bytes:
        """As few calls as can be: each gives other threads the interpreter, and waits until it is given back."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        received, num_bytes = bytearray(), _HEAD_BYTES
        while len(received) < num_bytes:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise EOFError
            received += piece
            if len(received) >= _HEAD_BYTES:
                num_bytes = _HEAD_BYTES + int.from_bytes(received[:_HEAD_BYTES], "big")
        return bytes(received[_HEAD_BYTES:])

    def _verdict(self, error: Exception) -> Exception:
        """Why the exchange failed; ends what is left of the process."""
        ended_by_itself = isinstance(error, (EOFError, OSError)) and not isinstance(error, TimeoutError)
        if ended_by_itself:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        code = self._process.poll()
        self.close()
        if isinstance(error, TimeoutError) or code in (-signal.SIGALRM, -signal.SIGPROF):
            return TimeLimitReached()
        return WorkerDied(f"exit code {code}")
