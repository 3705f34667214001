"""`INVALID`, the placeholder of a field that is wrong or missing in a partially read resource.

Any use of it raises `NotValid`, which ends the check that needs the field; all other checks go on. `partial` inserts
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")


class NotValid(Exception):
    """A check used a field that is wrong or missing."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotValid


class _Invalid:
    """The type of `INVALID`: not `None`, and every operation on it raises `NotValid`."""

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
    """Iterate over (index, item) of a list's valid items. Raises `NotValid` where the list itself is invalid."""
    return ((index, item) for index, item in enumerate(items) if item is not INVALID)


def each_on_its_own(checks: Iterable[Callable[[], Iterable[Item]]]) -> Iterator[Item]:
    """Yield the findings of all checks. A check that needs an invalid field ends; the others go on."""
    for check in checks:
        with suppress(NotValid):
            yield from check()
