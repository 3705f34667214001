"""The events that a parser makes of an answer's text, and the choice of parsers for a request. Pure values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec


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


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to parse one request's answer. Part of `GenerateRequest`."""

    tools: str = ""
    """Name of the parser of tool calls; empty: the request has no tools."""
    reasoning: str = ""
    """Name of the parser of reasoning; empty: reasoning is not separated from text."""
    starts_in_reasoning: bool = False
    """The prompt ends with the marker that opens the reasoning."""
    shows_reasoning: bool = True
    reasoning_budget: int | None = None
    """Maximum tokens between the markers; the engine then forces the end marker. `None`: no limit."""
    parallel: bool = True
    """If false, the client gets the first call only."""
    named: bool = False
    """The client named the function to call: the answer then ends with `stop`, as in OpenAI's API."""
    string_parameters: dict[str, list[str]] = {}
    """For each tool, the parameters whose values are text, for formats that do not quote text."""
