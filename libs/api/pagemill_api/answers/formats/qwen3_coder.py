"""Qwen3-Coder's format: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are not quoted: a value that the tool declares as text stays text; any other is parsed as JSON where possible.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill_api.answers.call_syntax import CallSyntax, Schema
from pagemill_api.answers.json_text import json_of
from pagemill_api.answers.markup import MarkupParser
from pagemill_api.answers.one_by_one import CallArgument, arguments_of
from pagemill_api.grammars.schemas.reading import is_text, listed_texts, parts
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
)
from pagemill_protocol.errors import show

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_COMMENTS = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})


def _parameters_of(schema: Schema) -> Format:
    """Return the form of the parameters in the order of the schema, with optional ones optional."""
    arguments = arguments_of(schema)
    for each in arguments:
        if not re.fullmatch(r"[^<>\s]+", each.name):
            raise ValueError(f"the property {show(each.name)} cannot be written in a tag; rename it")
    return SequenceFormat(
        elements=[_parameter(each) if each.required else Optional(content=_parameter(each)) for each in arguments]
    )


def _written(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return json_of(arguments)
    values = {name: value if isinstance(value, str) else json_of(value) for name, value in arguments.items()}
    return "".join(f"{_PARAMETER}{name}>\n{value}\n{_PARAMETER_END}\n" for name, value in values.items())


def _parameter(argument: CallArgument) -> Format:
    value = _value(argument)
    end = "" if isinstance(value, AnyText) else "\n"  # free text ends at the end marker that the parser searches
    return Tag(begin=f"{_PARAMETER}{argument.name}>\n", content=value, end=f"{end}{_PARAMETER_END}\n")


def _value(argument: CallArgument) -> Format:
    """Return the form of a value. Text is not quoted, so its schema becomes an expression; all other values are
    JSON."""
    schema = argument.schema
    return _text(argument, schema) if is_text(schema, schema) else JsonSchema(json_schema=schema)


def _text(argument: CallArgument, schema: Any) -> Format:
    """Return the form of a text without quotes. Where the schema also allows `null`, the argument is a text too."""
    root = argument.schema
    values, others, options = listed_texts(root, schema), set[str](), list[Format]()
    least, most = 0, math.inf
    for part in parts(root, schema):
        held = {key: value for key, value in part.items() if key not in _COMMENTS}
        least = max(least, held.pop("minLength", 0))
        most = min(most, held.pop("maxLength", math.inf))
        for key in ("anyOf", "oneOf"):
            given = held.pop(key, ())
            options += [_text(argument, each) for each in given if is_text(root, each)]
        others |= held.keys() - {"type", "$ref", "allOf", "const", "enum"}
    has_length = bool(least) or most != math.inf
    if values is not None and not others and not has_length:
        return Or(elements=[ConstString(value=each) for each in values])
    if others or (options and (values is not None or has_length)) or (values is not None and has_length):
        keys = ", ".join(sorted(others)) or "enum with a length, or options with others"
        raise ValueError(f"the text {show(argument.name)} is written without quotes and cannot enforce {keys}")
    if options:
        free = next((each for each in options if isinstance(each, AnyText)), None)
        return free or Or(elements=options)
    return Regex(pattern=f"[^<]{{{least},{'' if most == math.inf else most}}}") if has_length else AnyText()


SYNTAX = CallSyntax(
    begin=f"\n{_FUNCTION}%s>\n",
    end=f"{_FUNCTION_END}\n{_CALL_END}",
    opening=_CALL,
    separator="\n" + _CALL,
    trigger=_CALL,
    arguments=_parameters_of,
    write=_written,
)


class Qwen3CoderParser(MarkupParser):
    """Emits a value as a whole, once its parameter closes."""

    call_markers = (_CALL, _FUNCTION)

    def __init__(self, string_parameters: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._string_parameters = string_parameters
        self._held = ""

    def _text(self) -> bool:
        text, marker = self._take(_CALL, _FUNCTION)
        self._content(text)
        if marker:
            self._state = self._function if marker == _FUNCTION else self._opening
            self._held = ""
        return bool(marker)

    def _opening(self) -> bool:
        text, marker = self._take(_FUNCTION, _CALL_END)
        self._held += text
        held = self._held.strip()
        if marker == _FUNCTION and not held:
            self._state = self._function
            self._held = ""
        elif marker or (held and not (self._final and _FUNCTION.startswith(held))):
            self._content(_CALL + self._held)
            self._buffer = marker + self._buffer
            self._state = self._text
        else:
            return False
        return True

    def _function(self) -> bool:
        name = self._upto(">")
        if name is None:
            return False
        self._name = name.strip()
        self._begin(self._name)
        self._num_parameters = 0
        self._state = self._parameters
        return True

    def _parameters(self) -> bool:
        _, marker = self._take(_PARAMETER, _FUNCTION_END, _CALL_END)
        if marker == _PARAMETER:
            self._state = self._key
        elif marker:
            self._arguments("}" if self._num_parameters else "{}")
            self._end()
            self._state = self._closing if marker == _FUNCTION_END else self._text
        return bool(marker)

    def _key(self) -> bool:
        key = self._upto(">")
        if key is None:
            return False
        self._parameter = key.strip()
        self._state = self._value
        return True

    def _value(self) -> bool:
        raw = self._upto(_PARAMETER_END)
        if raw is None:
            return False
        is_text = self._parameter in self._string_parameters.get(self._name, ())
        value = raw.removeprefix("\n").removesuffix("\n")
        self._arguments(("{" if not self._num_parameters else ", ") + json_of(self._parameter) + ": ")
        self._arguments(json_of(value) if is_text else _as_json(value))
        self._num_parameters += 1
        self._state = self._parameters
        return True

    def _closing(self) -> bool:
        """Skip the end of the call after `</function>`; other text in its place is content."""
        if not self._skip_space() or (_CALL_END.startswith(self._buffer) and self._buffer != _CALL_END):
            return False
        self._buffer = self._buffer.removeprefix(_CALL_END)
        self._state = self._text
        return True

    def _upto(self, marker: str) -> str | None:
        """Consume the text before `marker` and the marker. Returns the text, or None until the marker has arrived."""
        text, found = self._take(marker)
        self._held += text
        if not found:
            return None
        held, self._held = self._held, ""
        return held


def _as_json(value: str) -> str:
    try:
        return json_of(json.loads(value))
    except (ValueError, RecursionError):
        return json_of(value)
