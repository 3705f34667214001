"""The events that a parser makes of an answer's text. Pure values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    name: str
    call: int = 0
    """Index of the call in the answer; set by `parser`, not by the parsers of single formats."""


class CallArguments(NamedTuple):
    """The next piece of the JSON text of the current call's arguments."""

    text: str
    call: int = 0


class CallEnd(NamedTuple):
    pass


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
"""Events in the order of the text; arguments and end belong to the call that began last."""


def calls_are_complete(events: Iterable[Event]) -> bool:
    """Return whether there are calls, and all of them end."""
    kinds = [type(event) for event in events]
    return 0 < kinds.count(CallBegin) <= kinds.count(CallEnd)


class Parser(Protocol):
    """A parser of one answer. Events depend on the text so far, never on how it was split into pieces."""

    @property
    def call_markers(self) -> Sequence[str]:
        """Texts that begin calls wherever they are, also in reasoning whose end the model left out."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Return the remaining events after the last text.

        Text that was held back and is no part of a call is content. A call whose arguments are incomplete has no
        `CallEnd`, and one whose name is incomplete has no event.
        """
        ...

    @property
    def in_reasoning(self) -> bool: ...
