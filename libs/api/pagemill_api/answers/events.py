"""The events that a parser makes of an answer's text. Pure values."""

from __future__ import annotations

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


class Parser(Protocol):
    """A parser of one answer. Events depend on the text so far, never on how it was split into pieces."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Return the remaining events after the last text: text held back, and the end of a call that is still open."""
        ...

    @property
    def in_reasoning(self) -> bool: ...
