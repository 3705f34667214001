"""The entries of a request's budget: which functions of the gateway belong to each, and what each of them takes.

A call counts for the innermost entry that it is made in, so the entries add up to the request. Calls are counted by a
profile hook and times are taken by wrappers, in runs of their own: each would change what the other finds. What is
played meanwhile: `gateway_budget`.
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

from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.limits.limiter import Limiter, Reservation
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay import preparation
from pagemill_gateway.relay.delivery import Delivery
from pagemill_gateway.relay.engine_link import Backlog, EngineLink
from pagemill_gateway.relay.upstream import Upstream
from pagemill_gateway.routes import access, generate
from pagemill_protocol.dialects.chat import ChatBody, ChatDialect
from pagemill_protocol.http import connection
from pagemill_protocol.http.direct import DirectResponse
from pagemill_protocol.keys.ring import KeyRing
from pagemill_protocol.text.tokenizer import Tokenizer
from routers.answers import Answer

REST = "the request's own code"
BENCH = "what the bench plays"
RELAYS = "relays"
_METRICS = ("prepared", "routed", "first_token", "cached", "attempt", "reserved", "tenant_used", "finished")
ENTRIES: dict[str, list[tuple[Any, str]]] = {
    "head": [(connection._BoundedProtocol, "data_received")],
    "body": [(generate, "read_counted")],
    "key": [(KeyRing, "authenticate")],
    "schema": [(ChatDialect, "parse"), (ChatBody, "sampling"), (preparation, "within_vocabulary")],
    "render": [(ChatBody, "render_soon")],
    "tokenize": [(Tokenizer, "encode_within")],
    "hash": [(preparation, "make_routing_request"), (preparation, "prompt_keys")],
    "limits": [(Limiter, "check"), (Limiter, "reserve"), (Reservation, "settle")],
    "decide": [
        *((LocalBrain, name) for name in ("find", "choose", "accepted", "started", "finished", "record_outcome")),
    ],
    "dispatch": [(Delivery, "begin"), (Upstream, "open")],
    RELAYS: [(EngineLink, "data_received"), (Backlog, "turn"), (DirectResponse, "write_now")],
    "log": [(access, "_line"), (logging.Logger, "info")],
    "metrics": [(WorkerMetrics, name) for name in _METRICS],
}


_PLAYED: list[tuple[Any, str]] = [(Answer, "frame"), (Answer, "frame_end")]


class Count(NamedTuple):
    """Calls of Python functions, and of built-in ones."""

    python: int
    native: int


class Counts:
    """Calls by entry, while `counting`."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.native: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        """Of Python, by file and name."""
        self._entries = {_code(owner, name): entry for entry, names in ENTRIES.items() for owner, name in names}
        self._stack: list[str] = []

    def __getitem__(self, entry: str) -> Count:
        return Count(self.python[entry], self.native[entry])

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._trace)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if "/bench/" in file:
            return
        stack = self._stack
        current = stack[-1] if stack else REST
        if event == "call":
            entry = self._entries.get(frame.f_code, current)
            stack.append(entry)
            self.python[entry] += 1
            self.functions[f"{file.rpartition('/')[2]}:{frame.f_code.co_qualname}"] += 1
        elif event == "return":
            if stack:
                stack.pop()
        elif event == "c_call":
            self.native[current] += 1


class Times:
    """CPU time of the thread by entry, without what entries inside of it took."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self._inside: list[int] = []
        """Of each entry that is running: what those inside of it have taken so far."""

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
            self.ns[entry] += elapsed - self._inside.pop()
            if self._inside:
                self._inside[-1] += elapsed


def _code(owner: Any, name: str) -> Any:
    return inspect.unwrap(getattr(owner, name)).__code__
