"""Connections of aiohttp clients that a test leaves open are reported with that test when its event loop is closed.

aiohttp itself warns when the garbage collector finds them, in whichever test runs then. `tests/conftest.py` calls
`refuse_unclosed` after every test.
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from aiohttp import connector

_opened_by: WeakKeyDictionary[connector.Connection, str] = WeakKeyDictionary()
_begin = connector.Connection.__init__


def _noted(connection: connector.Connection, *args: object) -> None:
    _begin(connection, *args)  # type: ignore[arg-type]
    _opened_by[connection] = os.environ.get("PYTEST_CURRENT_TEST", "no test")


def watch_connections() -> None:
    connector.Connection.__init__ = _noted  # type: ignore[assignment,method-assign]


def refuse_unclosed() -> None:
    """Fail if a connection can never be released any more."""
    left = [each for each in _opened_by if each._protocol is not None and each._loop.is_closed()]
    named = [f"{each!r} of {_opened_by.pop(each)}" for each in left]
    assert not named, f"responses are not read to their end or closed (use `async with`): {'; '.join(named)}"
