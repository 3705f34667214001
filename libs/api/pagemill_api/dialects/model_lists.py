"""The bodies of `GET /v1/models` and `GET /v1/models/{id}`, which two APIs have at the same path.

Clients of Anthropic's API send the header `anthropic-version`; all others get OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from pagemill_api.dialects.anthropic import render as anthropic
from pagemill_api.openai import render as openai
from pagemill_api.openai.render import ModelCard
from pagemill_protocol.errors import ErrorBody, error_body, invalid_field, show

VERSION_HEADER = "anthropic-version"
DEFAULT_PAGE, MAX_PAGE = 20, 1000
HeaderOf = Callable[[str], str | None]
"""Returns the header with a name, or None."""


def error_body_for(header: HeaderOf) -> ErrorBody:
    """Return the function that renders errors in the shape of the client's API."""
    return error_body if header(VERSION_HEADER) is None else anthropic.error_body


def list_body(cards: Sequence[ModelCard], header: HeaderOf, query: Mapping[str, str]) -> bytes:
    """Return the body of `GET /v1/models`. Raises `PagemillError` 400."""
    if header(VERSION_HEADER) is None:
        return openai.models_body(cards)
    page, has_more = _page(cards, query)
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return orjson.dumps({"data": [_model(card) for card in page], "has_more": has_more, **ends})


def card_body(card: ModelCard, header: HeaderOf) -> bytes:
    """Return the body of `GET /v1/models/{id}`."""
    return openai.model_body(card) if header(VERSION_HEADER) is None else orjson.dumps(_model(card))


def _page(cards: Sequence[ModelCard], query: Mapping[str, str]) -> tuple[Sequence[ModelCard], bool]:
    """Return the cards that the client asks for, and whether there are more in that direction."""
    limit, ids = _limit(query.get("limit")), [card.id for card in cards]
    if before := query.get("before_id"):
        end = _place(ids, before, "before_id")
        start = max(0, end - limit)
        return cards[start:end], start > 0
    after = query.get("after_id")
    start = _place(ids, after, "after_id") + 1 if after else 0
    return cards[start : start + limit], start + limit < len(cards)


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_PAGE
    if not value.isascii() or not value.isdecimal() or len(value) > 4 or not 1 <= int(value) <= MAX_PAGE:
        raise invalid_field("limit", f"`limit` must be an integer from 1 to {MAX_PAGE}, got {show(value)}.")
    return int(value)


def _place(ids: Sequence[str], name: str, field: str) -> int:
    if name not in ids:
        raise invalid_field(field, f"`{field}` names no model that is served here: {show(name)}. Send one of the list.")
    return ids.index(name)


def _model(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created_unix_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created,
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
        "lifecycle": "active",
    }
