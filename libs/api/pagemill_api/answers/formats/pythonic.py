"""Llama's pythonic format: the answer is a list of calls, `[get_weather(city="Rome", days=2), now()]`.

LFM2 writes such lists between two markers, and text around them.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Sequence
from typing import Any

from pagemill_api.answers.call_syntax import CallSyntax, Schema
from pagemill_api.answers.json_text import ValueScanner, json_of
from pagemill_api.answers.markup import MarkupParser
from pagemill_api.answers.one_by_one import CallArgument, arguments_of, required_first
from pagemill_api.structural_tags import ConstString, Format, JsonSchema, Optional, Regex, SequenceFormat
from pagemill_protocol.errors import show

_TAGS = ("<|python_start|>", "<|python_tag|>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_OPENING = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_PARTIAL_KEYWORD = re.compile(r"[A-Za-z_][\w.]*\s*\(\s*(?:\Z|[A-Za-z_]\w*\s*(?:\Z|=)|\))")
"""The start of a call that may be complete later."""
_PARTIAL_OPENING = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*)?\Z")


def _keywords(schema: Schema) -> Format:
    """Return the form `key=value, ...`, required arguments first. Values are written as JSON and read as Python."""
    arguments = arguments_of(schema)
    for each in arguments:
        if not each.name.isidentifier() or keyword.iskeyword(each.name):
            raise ValueError(f"the property {show(each.name)} cannot be a keyword of a Python call; rename it")
    return required_first([(_keyword(each), each.required) for each in arguments], ", ")


def _written(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return json_of(arguments)
    return ", ".join(f"{name}={json_of(value)}" for name, value in arguments.items())


def _keyword(argument: CallArgument) -> Format:
    return SequenceFormat(elements=[ConstString(value=f"{argument.name}="), JsonSchema(json_schema=argument.schema)])


SYNTAX = CallSyntax(
    begin="%s(",
    end=")",
    opening="[",
    separator=", ",
    closing="]",
    arguments=_keywords,
    write=_written,
    text=Optional(content=Regex(pattern=r"\s*[^\s\[<](.|\n)*")),
)


LFM2_SYNTAX = SYNTAX._replace(opening=LFM2[0] + "[", closing="]" + LFM2[1], trigger=LFM2[0])


class PythonicParser(MarkupParser):
    """Emits a call as a whole, once its parenthesis closes."""

    def __init__(self, tags: Sequence[str] = _TAGS, end: str = "") -> None:
        """`end`: the marker after a list that text may follow; empty: nothing follows, and untagged lists are calls."""
        super().__init__()
        self.call_markers, self._end_tag = tags, end
        if end:
            self._state = self._words
        self._is_tagged = False
        self._opening = ""
        """What precedes the first call of a list."""

    def _text(self) -> bool:
        """Read the start of the answer, where a list of calls may begin."""
        if not self._skip_space():
            return False
        for tag in self.call_markers:
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                self._is_tagged = True
                return True
        if not self._final and (
            _PARTIAL_OPENING.match(self._buffer) or any(t.startswith(self._buffer) for t in self.call_markers)
        ):
            return False
        if _OPENING.match(self._buffer):
            self._buffer, self._opening = self._buffer[1:], "["
            self._state = self._between
        elif self._final and self._is_tagged and _PARTIAL_OPENING.match(self._buffer):
            self._buffer = ""
        else:
            self._state = self._words
        return True

    def _words(self) -> bool:
        text, marker = self._take(*self.call_markers)
        self._content(text)
        if marker:
            self._is_tagged = True
            self._state = self._text
        return bool(marker)

    def _between(self) -> bool:
        self._buffer = self._buffer.lstrip(", \t\r\n")
        if self._buffer[:1] == "]":
            self._buffer = self._buffer[1:]
            self._state = self._dropped
        elif self._buffer:
            self._scanner: ValueScanner | None = None
            self._raw = ""
            self._state = self._call
        return bool(self._buffer)

    def _call(self) -> bool:
        if self._scanner is None:
            name, bracket = self._take("(")
            self._raw += name
            if not bracket:
                return False
            self._buffer = bracket + self._buffer
            self._scanner = ValueScanner("\"'")
        end = self._scanner.scan(self._buffer)
        self._raw += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if self._scanner.done:
            self._emit()
        return bool(self._buffer)

    def _emit(self) -> None:
        call = _parsed(self._raw)
        if call is None:
            self._content(self._opening + self._raw)
            self._state = self._words
            return
        self._opening = ""
        name, arguments = call
        self._begin(name)
        self._arguments(arguments)
        self._end()
        self._state = self._between

    def _dropped(self) -> bool:
        """Drop the end marker after the list. Without one in the format, drop all that follows."""
        if not self._end_tag:
            self._buffer = ""
            return False
        _, marker = self._take(self._end_tag)
        if marker:
            self._is_tagged = False
            self._state = self._words
        return bool(marker)

    def _rest(self) -> None:
        if self._state != self._call:
            return
        if _PARTIAL_KEYWORD.match(self._raw):
            self._begin(self._raw.partition("(")[0].strip())
        elif "(" in self._raw:
            self._content(self._opening + self._raw)


def _parsed(source: str) -> tuple[str, str] | None:
    """Return name and arguments of `name(key=literal, ...)`; None for any other source."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments: dict[str, Any] = {}
        for each in call.keywords:
            if each.arg is None:
                return None
            arguments[each.arg] = ast.literal_eval(_with_json_names(each.value))
        return ast.unparse(call.func), json_of(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _with_json_names(value: ast.expr) -> ast.expr:
    """Return the expression with `true`, `false` and `null` replaced by their values in JSON."""
    known = {"true": True, "false": False, "null": None}

    class JsonNames(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(known[node.id]) if node.id in known else node

    transformed: ast.expr = JsonNames().visit(value)
    return transformed
