"""Waits for what `kubectl wait` cannot check: polls a predicate until it is true or fails the test with its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.1


def until(what: str, ask: Callable[[], T], *, timeout_s: float = 30.0, interval_s: float = INTERVAL_S) -> T:
    """Return the first true result of `ask`; the failure contains the last false one."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last answer: {answer!r})")
        time.sleep(interval_s)
