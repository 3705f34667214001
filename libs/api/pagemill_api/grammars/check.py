"""Refuse a form that cannot be compiled within limits of time and memory, before an engine receives it.

Gateways, the engine's own routes and the offline API call it. The compiler runs in a separate process (`worker`),
because nothing else can stop it; the verdicts on the latest forms are cached.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_api.sandbox.process import LimitedProcess, ProcessLimits, TimeLimitReached, WorkerDied
from pagemill_protocol.errors import PagemillError, internal_error, invalid_field, unavailable
from pagemill_protocol.request.structured_outputs import DEFAULT_FORM_CHARS, StructuredOutputs

logger = logging.getLogger(__name__)

LIMITS = ProcessLimits(cpu_limit_s=1.0, wall_limit_s=5.0, memory_bytes=1024 * 1024 * 1024)
SMALLEST_CPU_LIMIT_S = 0.03
"""Limit for a form of a few characters. Most take 1 to 2 ms."""
CPU_S_PER_CHAR = 1 / 128 / 1024
"""Added for each character, up to `cpu_limit_s`."""
MAX_PROCESSES = 2
MAX_VERDICTS = 1024
_WORKER_FILE = Path(__file__).with_name("worker.py")


class _Verdict(NamedTuple):
    fault: str
    """Empty: the form compiles."""
    part: int | None = None
    """Index of the wrong option of a structural tag, if known."""
    kind: str = "json_schema"
    """What the wrong option is."""


class FormChecks:
    """Checks forms. Thread-safe; processes start with the first forms and live as long as this object."""

    max_form_chars: int = DEFAULT_FORM_CHARS
    """The setting of the program."""

    def __init__(self, limits: ProcessLimits = LIMITS) -> None:
        self._limits = limits
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: deque[LimitedProcess] = deque()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        """Verdicts by digest of the form."""
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def check(self, outputs: StructuredOutputs, param: str = "structured_outputs", parts: Sequence[str] = ()) -> None:
        """Raise `PagemillError` (400) for an invalid form. Blocks while the compiler runs, usually a millisecond.

        `parts`: the request fields that the options of a structural tag come from; the error names the wrong one.
        """
        outputs.validate(param)
        verdict = self._verdict(outputs)
        if not verdict.fault:
            return
        kind = outputs.kind
        if verdict.part is not None and verdict.part < len(parts):
            param, kind = parts[verdict.part], verdict.kind
        raise invalid_field(param, f"The {kind} of `{param}` cannot be used: {verdict.fault.rstrip('.')}.")

    def accepts(self, outputs: StructuredOutputs) -> bool:
        """Whether `check` accepts a form, as far as its size allows compiling it. Blocks like `check`."""
        return not self._verdict(outputs).fault

    def _verdict(self, outputs: StructuredOutputs) -> _Verdict:
        form = msgspec.json.encode(outputs)
        if len(form) > self.max_form_chars:
            most = f"at most {self.max_form_chars} are allowed (max_form_chars)"
            return _Verdict(f"it has {len(form)} characters; {most}. Send a smaller one")
        key = hashlib.blake2b(form, digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._run(form)
            with self._lock:
                self._verdicts[key] = verdict
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        return verdict

    def _run(self, form: bytes) -> _Verdict:
        if not self._slots.acquire(timeout=self._limits.wall_limit_s):
            raise _busy(self._limits.wall_limit_s)
        try:
            return self._exchange(form)
        finally:
            self._slots.release()

    def _exchange(self, form: bytes) -> _Verdict:
        limit_s = min(self._limits.cpu_limit_s, SMALLEST_CPU_LIMIT_S + len(form) * CPU_S_PER_CHAR)
        process = self._borrow()
        try:
            reply = process.call("", msgspec.json.encode({"form": msgspec.Raw(form), "cpu_limit_s": limit_s}))
        except TimeLimitReached:
            self._replace()
            return _Verdict(f"it takes more than {limit_s:.2g} s to compile; send a simpler one")
        except WorkerDied:
            self._replace()
            return _Verdict("it takes too much memory to compile; send a simpler one")
        self._idle.append(process)
        return _Verdict(str(reply.get("text", "it is not valid Unicode")), reply.get("part"), str(reply.get("kind")))

    def _replace(self) -> None:
        """Start another process in the background, so that the next form does not wait for it."""
        threading.Thread(target=lambda: self._idle.append(self._borrow()), daemon=True, name="form-check").start()

    def _borrow(self) -> LimitedProcess:
        while self._idle:
            try:
                process = self._idle.pop()
            except IndexError:
                break
            if process.is_alive:
                return process
            process.close()
        try:
            return LimitedProcess({}, self._limits, _WORKER_FILE)
        except (TimeLimitReached, WorkerDied) as error:
            logger.error("the process that checks forms of answers does not start: %s", error)
            raise internal_error() from None


def _busy(wait_s: float) -> PagemillError:
    return unavailable(f"No form of answers could be checked within {wait_s:g} s. Retry later.")


def _close_all(processes: deque[LimitedProcess]) -> None:
    while processes:
        processes.pop().close()


CHECKS = FormChecks()
"""The checks of this process."""
