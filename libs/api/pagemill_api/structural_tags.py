"""Structural tags: forms of answers that mix fixed text, schemas and free text, as values.

Names and fields are those of xgrammar's structural tags, which vLLM also accepts. Clients send them as JSON,
`pagemill_api.answers` makes them for tools and reasoning, `pagemill_api.grammars` writes them as grammars.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from pagemill_protocol.request.structured_outputs import StructuredOutputs

SHAPES = (
    '{"structures": [{"begin", "schema", "end"}], "triggers": [...]} or {"format": {"type": "sequence", '
    '"elements": [...]}}'
)


class Element(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class ConstString(Element, frozen=True, tag="const_string"):
    value: str
    """May contain the texts of special tokens."""


class JsonSchema(Element, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool


class Regex(Element, frozen=True, tag="regex"):
    pattern: str


class Grammar(Element, frozen=True, tag="grammar"):
    grammar: str


class AnyText(Element, frozen=True, tag="any_text"):
    """Text without special tokens: the last element of a sequence, or the content of a tag, up to the tag's first
    `end`."""


class SequenceFormat(Element, frozen=True, tag="sequence"):
    elements: list[Format]


class Or(Element, frozen=True, tag="or"):
    elements: list[Format]


class Optional(Element, frozen=True, tag="optional"):
    content: Format


class Tag(Element, frozen=True, tag="tag"):
    begin: str
    content: Format
    end: str


class TriggeredTags(Element, frozen=True, tag="triggered_tags"):
    """Free text in which a trigger begins one of the tags whose `begin` starts with it."""

    triggers: list[str]
    tags: list[Tag]
    stop_after_first: bool = False


class TagsWithSeparator(Element, frozen=True, tag="tags_with_separator"):
    """One or more tags."""

    tags: list[Tag]
    separator: str = ""
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | SequenceFormat
    | Or
    | Optional
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


def read_tag(tag: Any) -> Format:
    """Return the elements of a structural tag in either of its shapes. Raises `ValueError`."""
    try:
        if isinstance(tag, dict) and "format" in tag:
            return msgspec.convert(tag, _Form).format
        structures = msgspec.convert(tag, _Structures)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"it must be an object such as {SHAPES}: {error}") from None
    tags = [
        Tag(begin=each.begin, content=JsonSchema(json_schema=each.schema), end=each.end)
        for each in structures.structures
    ]
    return TriggeredTags(triggers=structures.triggers, tags=tags)


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Structures(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


# Made at import by one thread: where several threads first use a type at the same moment, msgspec 0.22 reads a null
# pointer.
_DECODERS = (msgspec.json.Decoder(_Form), msgspec.json.Decoder(_Structures))


def element_of(outputs: StructuredOutputs) -> Format:
    """Return any form as an element of a larger one. Raises `ValueError` for a form that was not checked."""
    match outputs.kind:
        case "json_schema":
            return JsonSchema(json_schema=json.loads(outputs.json_schema))
        case "json_object":
            return JsonSchema(json_schema={"type": "object"})
        case "regex":
            return Regex(pattern=outputs.regex)
        case "choice":
            return Or(elements=[ConstString(value=each) for each in outputs.choice])
        case "grammar":
            return Grammar(grammar=outputs.grammar)
        case _:
            return read_tag(json.loads(outputs.structural_tag))


def write_tag(form: Format) -> str:
    """Return the JSON text for `StructuredOutputs.structural_tag`."""
    return msgspec.json.encode({"format": form}).decode()
