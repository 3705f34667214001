"""Content blocks of Anthropic's messages as text for chat templates: documents, search results, and what is not text.

An image in a user's own content is refused by its place. In the result of a tool it becomes a sentence, because an
agent cannot take it back and would be blocked by a refusal; the answer names it in a header. Shapes: Anthropic's
Messages API, version 2023-06-01.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from pagemill_api.openai.fields import MAX_CONTENT_PARTS, MAX_TEXT_CHARS, refusal, string_of
from pagemill_api.openai.unknown_fields import left_at
from pagemill_protocol.errors import show

Block = Mapping[str, Any]
READ = frozenset({"type", "text", "source", "title", "context", "content"})
"""Fields of blocks of text, documents and search results."""
NOT_READ = "[Here was {}, which this model cannot read.]"
WRITTEN_AS = {"image": "an image", "document": "a document that is not text"}
MAX_NAMED = 8
"""Most blocks that an answer's header names."""
DescribeTool = Callable[[str, str], str]
"""Returns the text for a reference to a tool by name, at a place in the body."""


def blocks_of(value: Any, field: str) -> Iterator[tuple[Block, str]]:
    """Yield content blocks, each with its place in the body."""
    if not isinstance(value, list):
        raise refusal(field, f"Content must be a string or a list of blocks, got {show(value)}.")
    if len(value) > MAX_CONTENT_PARTS:
        raise refusal(field, f"There are {len(value)} content blocks; at most {MAX_CONTENT_PARTS} are allowed.")
    for index, block in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(block, dict):
            raise refusal(where, f'A content block must be an object such as {{"type": "text"}}, got {show(block)}.')
        yield block, where


def texts_of(value: Any, field: str = "") -> str:
    """Return a string as it is, or the joined text of a list of text blocks."""
    if isinstance(value, str):
        return value
    return "\n".join(text_of(block, where) for block, where in blocks_of(value, field))


def text_of(block: Block, where: str) -> str:
    """Return the text of a user's block. Raises `PydanticCustomError` for blocks that are not text."""
    left_at("messages.content" if where.startswith("messages") else "system", block, READ)
    match block.get("type"):
        case "text":
            return string_of(block, "text", where)
        case "document":
            return _document(block, where)
        case "search_result":
            return _titled("Search result", block.get("title"), block.get("source"), _content(block, where))
        case _:
            raise unsupported_block(block, where)


class ToolResults:
    """Texts of the results of tools; collects the places of blocks that are not text."""

    def __init__(self, describe_tool: DescribeTool) -> None:
        self._describe_tool = describe_tool
        self.unread: list[str] = []

    def text(self, value: Any, field: str) -> str:
        if isinstance(value, str):
            return value
        return "\n".join(self._text(block, where) for block, where in blocks_of(value, field))

    def _text(self, block: Block, where: str) -> str:
        kind = block.get("type")
        if kind == "tool_reference":
            return self._describe_tool(string_of(block, "tool_name", where), f"{where}.tool_name")
        if kind == "image" or (kind == "document" and not _is_text(block)):
            if len(self.unread) < MAX_NAMED:
                self.unread.append(where)
            return NOT_READ.format(WRITTEN_AS[kind])
        return text_of(block, where)


def unsupported_block(block: Block, where: str) -> PydanticCustomError:
    return refusal(
        f"{where}.type",
        f'Content blocks of type {show(block.get("type"))} are not supported here. Send blocks of type "text".',
        "unsupported_parameter",
    )


def _source(block: Block) -> Block:
    source = block.get("source")
    return source if isinstance(source, dict) else {}


def _is_text(document: Block) -> bool:
    source = _source(document)
    kind = source.get("type")
    return kind in ("text", "content") or (kind == "base64" and str(source.get("media_type", "")).startswith("text/"))


def _document(block: Block, where: str) -> str:
    source, place = _source(block), f"{where}.source"
    if not _is_text(block):
        raise refusal(
            f"{where}.type",
            f'Blocks of type "document" with a source of type {show(source.get("type"))} cannot be read here. Send '
            'the text, with a source of type "text".',
            "unsupported_parameter",
        )
    match source["type"]:
        case "content":
            text = _content(source, place)
        case "base64":
            text = _decoded(string_of(source, "data", place), f"{place}.data")
        case _:
            text = string_of(source, "data", place)
    return _titled("Document", block.get("title"), block.get("context"), text)


def _content(block: Block, where: str) -> str:
    """Return the text of `content`, a string or a list of text blocks."""
    value = block.get("content")
    if isinstance(value, str):
        return value
    return "\n".join(string_of(each, "text", place) for each, place in _only_texts(value, f"{where}.content"))


def _only_texts(value: Any, field: str) -> Iterator[tuple[Block, str]]:
    for block, where in blocks_of(value, field):
        if block.get("type") != "text":
            raise unsupported_block(block, where)
        yield block, where


def _decoded(data: str, field: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise refusal(field, f"`data` must be UTF-8 text in base64, got {show(data)}.") from None


def _titled(kind: str, title: Any, about: Any, text: str) -> str:
    """Return a text below a line with its title and what else is known of it."""
    known = {name: each for name, each in (("title", title), ("about", about)) if isinstance(each, str) and each}
    return f"{kind} {json.dumps(known, ensure_ascii=False)}:\n{text}" if known else text


def _block(kind: str, **properties: Any) -> dict[str, Any]:
    given = {"type": {"const": kind}, **properties}
    return {"type": "object", "properties": given, "required": list(given)}


_STRING = {"type": "string"}
_LONG_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
TEXTS_SCHEMA = {
    "anyOf": [_LONG_TEXT, {"type": "array", "items": _block("text", text=_STRING), "maxItems": MAX_CONTENT_PARTS}]
}
_TEXT_SOURCE = {"type": "object", "properties": {"type": {"const": "text"}, "data": _STRING}}
CONTENT_SCHEMA = {
    "anyOf": [
        _LONG_TEXT,
        {
            "type": "array",
            "maxItems": MAX_CONTENT_PARTS,
            "items": {
                "anyOf": [
                    _block("text", text=_STRING),
                    _block("document", source={**_TEXT_SOURCE, "required": ["type", "data"]}),
                    _block("search_result", source=_STRING, title=_STRING, content=TEXTS_SCHEMA),
                    _block("thinking", thinking=_STRING),
                    _block("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
                    _block("tool_result", tool_use_id=_STRING, content=TEXTS_SCHEMA),
                ]
            },
        },
    ]
}
