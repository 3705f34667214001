"""Formats that write each argument in a tag: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

Values are not quoted: a value that the tool declares as text stays text; any other is parsed as JSON where possible.
Qwen3-Coder, Seed-OSS and MiniMax M2 have the same structure with other markers; `glm` has another order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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


class Tags(NamedTuple):
    """The markers of a format. A name and a key are between the first and the second marker of their kind."""

    call: str
    call_end: str
    function: str = "<function="
    name_end: str = ">"
    function_end: str = "</function>"
    parameter: str = "<parameter="
    key_end: str = ">"
    value: str = ""
    """Marker before a value, after a key that has an end marker."""
    value_end: str = "</parameter>"
    around: str = "\n"
    """What is written before and after a value, and does not belong to it."""
    shares_block: bool = False
    """All calls of an answer stand between one pair of `call` and `call_end`."""


QWEN3_CODER = Tags("<tool_call>", "</tool_call>")
SEED_OSS = Tags("<seed:tool_call>", "</seed:tool_call>", around="")
MINIMAX_M2 = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="', '">',
    around="", shares_block=True,
)  # fmt: skip
_COMMENTS = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})


def _parameters_of(tags: Tags, schema: Schema) -> Format:
    """Return the form of the parameters in the order of the schema, with optional ones optional."""
    arguments = arguments_of(schema)
    for each in arguments:
        if not re.fullmatch(r"[^<>\s\"]+", each.name):
            raise ValueError(f"the property {show(each.name)} cannot be written in a tag; rename it")
    forms = [(_parameter(tags, each), each.required) for each in arguments]
    return SequenceFormat(elements=[form if required else Optional(content=form) for form, required in forms])


def _written(tags: Tags, arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return json_of(arguments)
    values = {name: value if isinstance(value, str) else json_of(value) for name, value in arguments.items()}
    return "".join(
        f"{_before_value(tags, name)}{value}{tags.around}{tags.value_end}\n" for name, value in values.items()
    )


def _before_value(tags: Tags, name: str) -> str:
    gap = "\n" if tags.value else ""
    return f"{tags.parameter}{name}{tags.key_end}{gap}{tags.value}{tags.around}"


def _parameter(tags: Tags, argument: CallArgument) -> Format:
    value = _value(argument)
    end = "" if isinstance(value, AnyText) else tags.around  # free text ends at the end marker that is searched
    return Tag(begin=_before_value(tags, argument.name), content=value, end=f"{end}{tags.value_end}\n")


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


def syntax_of(tags: Tags) -> CallSyntax:
    block = "\n" if tags.shares_block else ""
    gap = "\n" if tags.function and not tags.shares_block else ""
    end = f"{tags.function_end}\n" if tags.function_end else ""
    return CallSyntax(
        begin=f"{gap}{tags.function}%s{tags.name_end}\n" if tags.function else "%s\n",
        end=end if tags.shares_block else end + tags.call_end,
        opening=tags.call + block,
        separator="" if tags.shares_block else "\n" + tags.call,
        closing=tags.call_end if tags.shares_block else "",
        trigger=tags.call,
        arguments=partial(_parameters_of, tags),
        write=partial(_written, tags),
    )


class TaggedParser(MarkupParser):
    """Emits text while it is written, and any other value once its parameter closes."""

    def __init__(self, tags: Tags, string_parameters: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._tags = tags
        self.call_markers = (tags.call, tags.function) if tags.function else (tags.call,)
        self._string_parameters = string_parameters
        self._held = ""

    def _text(self) -> bool:
        text, marker = self._take(*self.call_markers)
        self._content(text)
        if marker:
            self._state = self._opening if marker == self._tags.call else self._function
            self._held = ""
        return bool(marker)

    def _opening(self) -> bool:
        text, marker = self._take(self._tags.function, self._tags.call_end)
        self._held += text
        held = self._held.strip()
        if marker == self._tags.function and not held:
            self._state = self._function
            self._held = ""
        elif marker or (held and not (self._final and self._tags.function.startswith(held))):
            self._content(self._tags.call + self._held)
            self._buffer = marker + self._buffer
            self._state = self._text
        else:
            return False
        return True

    def _function(self) -> bool:
        name = self._upto(self._tags.name_end)
        if name is None:
            return False
        self._named(name)
        return True

    def _named(self, name: str) -> None:
        self._name = name.strip()
        self._begin(self._name)
        self._num_parameters = 0
        self._state = self._parameters

    def _parameters(self) -> bool:
        tags = self._tags
        _, marker = self._take(*filter(None, (tags.parameter, tags.function_end, tags.call_end)))
        if marker == tags.parameter:
            self._state = self._key
        elif marker:
            self._arguments("}" if self._num_parameters else "{}")
            self._end()
            self._state = self._closing if marker == tags.function_end else self._text
        return bool(marker)

    def _key(self) -> bool:
        key = self._upto(self._tags.key_end)
        if key is None:
            return False
        self._parameter = key.strip()
        self._state = self._before_value if self._tags.value else self._start_value
        return True

    def _before_value(self) -> bool:
        _, marker = self._take(self._tags.value)
        if marker:
            self._state = self._start_value
        return bool(marker)

    def _start_value(self) -> bool:
        """Drop the line break before a value. Anything else, of no characters too, is the value."""
        around = self._tags.around
        if around and self._buffer.startswith(around):
            self._buffer = self._buffer[len(around) :]
        key = ("{" if not self._num_parameters else ", ") + json_of(self._parameter) + ": "
        self._num_parameters += 1
        if self._parameter in self._string_parameters.get(self._name, ()):
            self._arguments(key + '"')
            self._state = self._string
        else:
            self._before = key
            self._state = self._value
        return True

    def _string(self) -> bool:
        text, marker = self._take(self._tags.value_end, releases=False)
        text, self._held, around = self._held + text, "", self._tags.around
        if marker:
            self._arguments(json_of(text.removesuffix(around))[1:-1] + '"')
            self._state = self._parameters
            return True
        if around and text.endswith(around):
            text, self._held = text[: -len(around)], around
        self._arguments(json_of(text)[1:-1])
        return False

    def _value(self) -> bool:
        raw = self._upto(self._tags.value_end)
        if raw is None:
            return False
        self._arguments(self._before + _as_json(raw.removesuffix(self._tags.around)))
        self._state = self._parameters
        return True

    def _closing(self) -> bool:
        """Skip the end of the call after its function's; other text in its place is content."""
        end = self._tags.call_end
        if not self._skip_space() or (end.startswith(self._buffer) and self._buffer != end):
            return False
        self._buffer = self._buffer.removeprefix(end)
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
