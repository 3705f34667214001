"""Bodies of `/v1/conversations`, and the field `conversation` of a response's. Their gateway keeps the items."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, WithJsonSchema

from pagemill_api.dialects.openai_responses.items import INPUT_SCHEMA, Item, ItemMessages, input_items
from pagemill_api.openai.fields import RequestModel, refusal
from pagemill_api.openai.parse import parse_body
from pagemill_protocol.errors import show


def _conversation_items(value: Any) -> list[Item]:
    if not isinstance(value, list):
        raise refusal("", f"`items` must be a list of items, got {show(value)}.")
    found = ItemMessages()
    for index, item in enumerate(input_items(value) if value else ()):
        found.add(item, f"[{index}]")
    return value


Items = Annotated[list[Item], PlainValidator(_conversation_items), WithJsonSchema(INPUT_SCHEMA["anyOf"][1])]


class _Readable(RequestModel):
    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Parse a body. Raises `PagemillError` 400."""
        return parse_body(raw, cls)


class ConversationRequest(_Readable):
    """Body of `POST /v1/conversations`."""

    items: Items = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)


class MetadataRequest(_Readable):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: dict[str, str]


class ItemsRequest(_Readable):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: Items


def _conversation_id(value: Any) -> str:
    found = value.get("id") if isinstance(value, dict) else value
    if not isinstance(found, str) or not found:
        raise refusal("", f"`conversation` must be the id of a conversation, got {show(value)}.")
    return found


_ID = {"type": "string", "minLength": 1}
ConversationId = Annotated[
    str,
    PlainValidator(_conversation_id),
    WithJsonSchema({"anyOf": [_ID, {"type": "object", "properties": {"id": _ID}, "required": ["id"]}]}),
]
