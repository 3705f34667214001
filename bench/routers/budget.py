"""The entries of a request's budget: the functions of the gateway that belong to each, and their cost.

A call counts for the innermost entry that contains it, or else for the part of the request that is running, so that
the entries add up to the request. Calls, system calls, allocations and times are measured in separate runs, because
each measurement would change the others. `gateway_budget` runs the requests; `allocations` counts allocations.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

from pagemill_api.dialects import preparing
from pagemill_api.dialects.chat_completions.chat import ChatBody, ChatDialect
from pagemill_api.text.encoding.local_encoder import LocalEncoder
from pagemill_gateway.limits.limiter import Limiter, Reservation
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay import preparation
from pagemill_gateway.relay.delivery import Delivery
from pagemill_gateway.relay.upstream import Upstream
from pagemill_gateway.routes import access, generate
from pagemill_routing.brain.brain import LocalBrain
from pagemill_servers import connection
from pagemill_servers.keys.ring import KeyRing
from routers.answers import Answer
from routers.in_memory import EngineWire, Wire

REST = "the request's own code"
"""The part from the first byte until the engine has the request, outside of all entries."""
ACCEPT = "accept"
"""Accepting a connection, which a client opens once for many requests."""
FIRST_FRAME = "first frame"
RELAYS = "relays"
"""Relaying all frames between the first and the last one."""
END = "end"
BENCH = "what the bench plays"
_METRICS = ("prepared", "routed", "first_token", "cached", "attempt", "reserved", "tenant_used", "finished")
ENTRIES: dict[str, list[tuple[Any, str]]] = {
    "head": [(connection._BoundedProtocol, "data_received")],
    "body": [(generate, "read_counted")],
    "key": [(KeyRing, "authenticate")],
    "schema": [(ChatDialect, "parse"), (ChatBody, "sampling"), (preparing, "within_vocabulary")],
    "render": [(ChatBody, "render_inline")],
    "tokenize": [(LocalEncoder, "encode"), (LocalEncoder, "_encode_segment")],
    "hash": [(preparation, "make_routing_request"), (preparation, "prompt_keys")],
    "limits": [(Limiter, "check"), (Limiter, "reserve"), (Reservation, "settle")],
    "decide": [
        *((LocalBrain, name) for name in ("find", "choose", "accepted", "started", "finished", "record_outcome")),
    ],
    "dispatch": [(Delivery, "begin"), (Upstream, "open")],
    "log": [(access, "_line"), (logging.Logger, "info")],
    "metrics": [(WorkerMetrics, name) for name in _METRICS],
}
PARTS = (REST, FIRST_FRAME, RELAYS, END)
"""The parts of a request, in order."""
ROWS = (ACCEPT, *list(ENTRIES)[:-2], FIRST_FRAME, RELAYS, END, "log", "metrics", REST)
"""The rows of the table, in the order of a request."""

_PLAYED: list[tuple[Any, str]] = [(Answer, "frame"), (Answer, "frame_end")]
_RECEIVED = "data_received"
_ASKED = frozenset({_RECEIVED, "connection_made", "__init__"})
"""Functions of the gateway that the benchmark calls in place of the event loop; its other calls do not count."""
_WRITES = frozenset({Wire.write.__code__, EngineWire.write.__code__})


class Played:
    """The part of a request that is running."""

    def __init__(self) -> None:
        self.part = REST

    def begin(self, part: str) -> None:
        self.part = part


class Clock(Played):
    """Measures the CPU time of the thread by part."""

    def __init__(self) -> None:
        super().__init__()
        self.ns: Counter[str] = Counter()
        self._since = time.thread_time_ns()

    def begin(self, part: str) -> None:
        now = time.thread_time_ns()
        self.ns[self.part] += now - self._since
        self.part, self._since = part, now


class Count(NamedTuple):
    """Numbers of calls: of Python functions, of built-in functions, and reads and writes of the kernel."""

    python: int
    native: int
    system: int


class Counts(Played):
    """Counts calls by entry while `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.python: Counter[str] = Counter()
        self.native: Counter[str] = Counter()
        self.system: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        """Calls of Python functions by file and name."""
        self._entries = {_code(owner, name): entry for entry, names in ENTRIES.items() for owner, name in names}
        self._stack: list[str] = []

    def __getitem__(self, entry: str) -> Count:
        return Count(self.python[entry], self.native[entry], self.system[entry])

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._trace)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        code, stack = frame.f_code, self._stack
        current = stack[-1] if stack else self.part
        if "/bench/" in code.co_filename:
            self.system[current] += event == "call" and code in _WRITES
        elif event == "call":
            entry = self._entry_of(frame, current)
            stack.append(entry)
            self.python[entry] += 1
            self.functions[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1
            self.system[entry] += code.co_qualname == "StreamHandler.flush"
        elif event == "return":
            if stack:
                stack.pop()
        elif event == "c_call":
            self.native[current] += 1

    def _entry_of(self, frame: FrameType, current: str) -> str:
        caller, code = frame.f_back, frame.f_code
        entry = self._entries.get(code, current)
        if caller is None or "/bench/" not in caller.f_code.co_filename:
            return entry
        if code.co_name not in _ASKED:
            return BENCH
        self.system[entry] += code.co_name == _RECEIVED
        return entry


class Times(Played):
    """Measures the CPU time of the thread by entry, without nested entries."""

    def __init__(self) -> None:
        super().__init__()
        self.ns: Counter[str] = Counter()
        self.parts_ns: Counter[str] = Counter()
        """Time of all entries together, by part."""
        self._inside: list[int] = []
        """For each running entry, the time of its nested entries so far."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with ExitStack() as stack:
            for entry, names in {**ENTRIES, BENCH: _PLAYED}.items():
                for owner, name in names:
                    function = inspect.getattr_static(owner, name)
                    stack.enter_context(mock.patch.object(owner, name, self._timed(entry, function)))
            yield

    def _timed(self, entry: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._entered(entry):
                    return await function(*args, **kwargs)

            return run_async

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._entered(entry):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _entered(self, entry: str) -> Iterator[None]:
        self._inside.append(0)
        started = time.thread_time_ns()
        try:
            yield
        finally:
            elapsed = time.thread_time_ns() - started
            own = elapsed - self._inside.pop()
            self.ns[entry] += own
            self.parts_ns[self.part] += own
            if self._inside:
                self._inside[-1] += elapsed


def _code(owner: Any, name: str) -> Any:
    return inspect.unwrap(getattr(owner, name)).__code__
