"""How a format writes tool calls, declared beside its parser, and the form of an answer that is made of it.

Pure values: requests, tokens and templates are the callers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pagemill_protocol.answers.json_text import json_of
from pagemill_protocol.structural_tags import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    Optional,
    Or,
    Regex,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)
from pagemill_protocol.structural_tags import Sequence as InOrder

Schema = Mapping[str, Any]
_GAP = Optional(content=Regex(pattern="\\n{1,2}"))


def as_json(schema: Schema) -> Format:
    return JsonSchema(json_schema=dict(schema))


class CallSyntax(NamedTuple):
    """Texts around a call's parts; they may spell special tokens."""

    begin: str
    """Before the arguments; `%s` is the function's name."""
    end: str
    """Behind the arguments."""
    opening: str = ""
    """Before the first call."""
    separator: str = ""
    """Between two calls."""
    closing: str = ""
    """Behind the last call."""
    trigger: str = ""
    """The start of `opening` that ends free text; empty: calls stand at the start of an answer only."""
    arguments: Callable[[Schema], Format] = as_json
    """Raises `ValueError` for a schema that cannot be written in this format."""
    write: Callable[[Any], str] = json_of
    """Given arguments, usually an object, in this format."""
    text: Format = AnyText()
    """An answer without calls."""
    text_opening: str = ""
    """Before an answer's text."""
    single: bool = False
    """An answer ends with its first call."""

    def example(self, calls: Sequence[tuple[str, Any]]) -> str:
        """How these calls, names and arguments, look in an answer."""
        written = (self.begin % name + self.write(arguments) + self.end for name, arguments in calls)
        return self.opening + self.separator.join(written) + self.closing


class Function(NamedTuple):
    name: str
    arguments: Format


def calls_only(syntax: CallSyntax, functions: Sequence[Function], *, parallel: bool) -> Format:
    """One call or more of these functions; without `parallel`, one."""
    tags = [Tag(begin=syntax.begin % each.name, content=each.arguments, end=syntax.end) for each in functions]
    stops = syntax.single or not parallel
    return Tag(
        begin=syntax.opening,
        content=TagsWithSeparator(tags=tags, separator=syntax.separator, stop_after_first=stops),
        end=syntax.closing,
    )


def text_and_calls(syntax: CallSyntax, functions: Sequence[Function], *, parallel: bool) -> Format:
    """Free text, in which calls are held to their schemas."""
    calls = calls_only(syntax, functions, parallel=parallel)
    if not syntax.trigger:
        return Or(elements=[calls, syntax.text])
    assert isinstance(calls, Tag)
    return TriggeredTags(triggers=[syntax.trigger], tags=[calls], stop_after_first=not parallel)


def with_opening(syntax: CallSyntax | None, form: Format) -> Format:
    """A form of the answer's text, where the format writes a header before it."""
    if syntax is None or not syntax.text_opening:
        return form
    return InOrder(elements=[ConstString(value=syntax.text_opening), form])


def behind_reasoning(begin: str, end: str, form: Format, *, is_open: bool) -> Format:
    """`form` after reasoning between two markers. `is_open`: the prompt has `begin` already, so the end must come."""
    thought = Tag(begin="" if is_open else begin, content=AnyText(), end=end)
    if is_open:
        return InOrder(elements=[thought, _GAP, form])
    return InOrder(elements=[Optional(content=InOrder(elements=[thought, _GAP])), form])
