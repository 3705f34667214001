"""What a parser makes of an answer's text, and which parsers a request uses. Pure values."""

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
    """Its index in the answer; parsers of one format leave it to `parser`."""


class CallArguments(NamedTuple):
    """The next piece of the JSON text of the current call's arguments."""

    text: str
    call: int = 0


class CallEnd(NamedTuple):
    pass


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
"""In the order of the text; arguments and end belong to the last begun call."""


class Parser(Protocol):
    """Events depend on the text so far, never on how it was cut into pieces."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """No text follows: what was held back, and the end of a call that is still open."""
        ...

    @property
    def in_reasoning(self) -> bool: ...


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to read one request's answer. Part of `GenerateRequest`."""

    tools: str = ""
    """Name of the parser of tool calls; empty: the request has no tools."""
    reasoning: str = ""
    """Name of the parser of reasoning; empty: reasoning is text like any other."""
    starts_in_reasoning: bool = False
    """The prompt ends with the marker that opens the reasoning."""
    shows_reasoning: bool = True
    reasoning_budget: int | None = None
    """Tokens between the markers at most; then the engine forces the end. `None`: no limit."""
    parallel: bool = True
    """False: the client gets the first call only."""
    named: bool = False
    """The client named the function to call: the answer then ends with `stop`, as OpenAI's does."""
    string_parameters: dict[str, list[str]] = {}
    """By tool, the parameters whose values are text, for formats that do not quote text."""
