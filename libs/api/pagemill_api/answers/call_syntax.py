"""The syntax in which a format writes tool calls, declared beside its parser, and forms of answers made from it.

Pure values; callers provide requests, tokens and templates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pagemill_api.answers.json_text import json_of
from pagemill_api.structural_tags import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    Optional,
    Or,
    Regex,
    SequenceFormat,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)

Schema = Mapping[str, Any]
_GAP = Optional(content=Regex(pattern="\\n{1,2}"))


def as_json(schema: Schema) -> Format:
    return JsonSchema(json_schema=dict(schema))


class CallSyntax(NamedTuple):
    """Texts around the parts of a call; they may contain the texts of special tokens."""

    begin: str
    """Text before the arguments; `%s` is the function's name."""
    end: str
    """Text after the arguments."""
    opening: str = ""
    """Text before the first call."""
    separator: str = ""
    """Text between two calls."""
    closing: str = ""
    """Text after the last call."""
    trigger: str = ""
    """The start of `opening` that ends free text; empty: calls occur at the start of an answer only."""
    arguments: Callable[[Schema], Format] = as_json
    """Returns the form of arguments with this schema. Raises `ValueError` for a schema that this format cannot
    express."""
    write: Callable[[Any], str] = json_of
    """Writes given arguments, usually an object, in this format."""
    text: Format = AnyText()
    """Form of an answer without calls."""
    text_opening: str = ""
    """Text before an answer's content."""
    single: bool = False
    """An answer ends after its first call."""

    def example(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of these calls (name, arguments) in an answer."""
        written = (self.begin % name + self.write(arguments) + self.end for name, arguments in calls)
        return self.opening + self.separator.join(written) + self.closing


class Function(NamedTuple):
    name: str
    arguments: Format


def calls_only(syntax: CallSyntax, functions: Sequence[Function], *, parallel: bool) -> Format:
    """Return the form of one or more calls of these functions; without `parallel`, of exactly one."""
    tags = [Tag(begin=syntax.begin % each.name, content=each.arguments, end=syntax.end) for each in functions]
    stops = syntax.single or not parallel
    return Tag(
        begin=syntax.opening,
        content=TagsWithSeparator(tags=tags, separator=syntax.separator, stop_after_first=stops),
        end=syntax.closing,
    )


def text_and_calls(syntax: CallSyntax, functions: Sequence[Function], *, parallel: bool) -> Format:
    """Return the form of free text with calls whose arguments conform to their schemas."""
    calls = calls_only(syntax, functions, parallel=parallel)
    if not syntax.trigger:
        return Or(elements=[calls, syntax.text])
    assert isinstance(calls, Tag)
    return TriggeredTags(triggers=[syntax.trigger], tags=[calls], stop_after_first=not parallel)


def with_opening(syntax: CallSyntax | None, form: Format) -> Format:
    """Return `form` after the header that the format writes before content, if it writes one."""
    if syntax is None or not syntax.text_opening:
        return form
    return SequenceFormat(elements=[ConstString(value=syntax.text_opening), form])


def after_reasoning(begin: str, end: str, form: Format, *, is_open: bool) -> Format:
    """Return `form` after reasoning between two markers.

    `is_open`: the prompt already ends with `begin`, so the end marker must follow.
    """
    thought = Tag(begin="" if is_open else begin, content=AnyText(), end=end)
    if is_open:
        return SequenceFormat(elements=[thought, _GAP, form])
    return SequenceFormat(elements=[Optional(content=SequenceFormat(elements=[thought, _GAP])), form])
