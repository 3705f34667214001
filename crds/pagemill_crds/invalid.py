"""`INVALID`: what stands in a partially read resource where a field is wrong or missing.

Its use raises `NotValid`: a check that needs the field ends there, every other check goes on. `partial` puts it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")


class NotValid(Exception):
    """A value that is known to be wrong was needed."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotValid


class _Invalid:
    """Stands for a value that is given, but wrong: it is not `None`, and nothing else can be said of it."""

    def __repr__(self) -> str:
        return "INVALID"


_USES = (
    "getattr bool str format hash len iter contains getitem eq ne lt le gt ge add radd sub rsub mul rmul mod rmod "
    "floordiv rfloordiv truediv rtruediv int float index"
)
for _use in _USES.split():
    setattr(_Invalid, f"__{_use}__", _refuse)

INVALID: Any = _Invalid()


def usable(items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    """(index, item) of the valid items of a list. Raises `NotValid` for a list that is none."""
    return ((index, item) for index, item in enumerate(items) if item is not INVALID)


def each_on_its_own(checks: Iterable[Callable[[], Iterable[Item]]]) -> Iterator[Item]:
    """What all checks find; one that needs an invalid field does not keep the others from theirs."""
    for check in checks:
        with suppress(NotValid):
            yield from check()
