"""Refuses a form of answers that cannot be compiled, or not within limits of time and memory, before an engine sees it.

Every front door calls it: gateways, the engine's own routes and the offline API. The work is done in a process of its
own (`worker`), because nothing else can stop a compiler; the verdicts on the latest forms are kept.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict, deque
from pathlib import Path

import msgspec

from pagemill_protocol.errors import PagemillError, internal_error, invalid_field, unavailable
from pagemill_protocol.structured_outputs import StructuredOutputs
from pagemill_protocol.text.template_process import TemplateLimits, TemplateProcess, TimeLimitReached, WorkerDied

logger = logging.getLogger(__name__)

LIMITS = TemplateLimits(cpu_limit_s=0.5, wall_limit_s=5.0, memory_bytes=1024 * 1024 * 1024)
MAX_PROCESSES = 2
MAX_VERDICTS = 1024
_WORKER_FILE = Path(__file__).with_name("worker.py")


class FormChecks:
    """Thread safe; processes start with the first forms and live as long as this object."""

    def __init__(self, limits: TemplateLimits = LIMITS) -> None:
        self._limits = limits
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: deque[TemplateProcess] = deque()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        """By digest of the form; empty: it compiles."""
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def check(self, outputs: StructuredOutputs, param: str = "structured_outputs") -> None:
        """Raise `PagemillError` (400) with what is wrong. Blocks for the compiler's time, usually a millisecond."""
        outputs.validate(param)
        form = msgspec.json.encode(outputs)
        key = hashlib.blake2b(form, digest_size=16).digest()
        with self._lock:
            fault = self._verdicts.get(key)
        if fault is None:
            fault = self._run(form)
            with self._lock:
                self._verdicts[key] = fault
                while len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if fault:
            raise invalid_field(param, f"The {outputs.kind} of `{param}` cannot be used: {fault.rstrip('.')}.")

    def _run(self, form: bytes) -> str:
        if not self._slots.acquire(timeout=self._limits.wall_limit_s):
            raise _busy(self._limits.wall_limit_s)
        try:
            return self._exchange(form)
        finally:
            self._slots.release()

    def _exchange(self, form: bytes) -> str:
        """A process that was killed while idle looks like one that a form killed: the first death is retried."""
        for attempt in (1, 2):
            process = self._borrow()
            try:
                reply = process.render("", form)
            except TimeLimitReached:
                return f"it takes more than {self._limits.cpu_limit_s:g} s to compile; send a simpler one"
            except WorkerDied:
                if attempt == 2:
                    return "it takes too much memory to compile; send a simpler one"
                continue
            self._idle.append(process)
            return str(reply.get("text", "it is not valid Unicode"))
        raise AssertionError("unreachable")

    def _borrow(self) -> TemplateProcess:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return TemplateProcess({}, self._limits, _WORKER_FILE)
        except (TimeLimitReached, WorkerDied) as error:
            logger.error("the process that checks forms of answers does not start: %s", error)
            raise internal_error() from None


def _busy(wait_s: float) -> PagemillError:
    return unavailable(f"No form of answers could be checked within {wait_s:g} s. Retry later.")


def _close_all(processes: deque[TemplateProcess]) -> None:
    while processes:
        processes.pop().close()


CHECKS = FormChecks()
"""Of this process."""
