"""The bodies of `GET /v1/models` and `GET /v1/models/{id}`, which two APIs have at the same path.

Clients of Anthropic's API send the header `anthropic-version`; all others get OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from pagemill_api.dialects.anthropic import render as anthropic
from pagemill_api.dialects.anthropic.listing import page_of
from pagemill_api.openai import render as openai
from pagemill_api.openai.render import ModelCard
from pagemill_protocol.errors import ErrorBody, error_body

VERSION_HEADER = "anthropic-version"
HeaderOf = Callable[[str], str | None]
"""Returns the header with a name, or None."""


def error_body_for(header: HeaderOf) -> ErrorBody:
    """Return the function that renders errors in the shape of the client's API."""
    return error_body if header(VERSION_HEADER) is None else anthropic.error_body


def list_body(cards: Sequence[ModelCard], header: HeaderOf, query: Mapping[str, str]) -> bytes:
    """Return the body of `GET /v1/models`. Raises `PagemillError` 400."""
    if header(VERSION_HEADER) is None:
        return openai.models_body(cards)
    return orjson.dumps(page_of([_model(card) for card in cards], query))


def card_body(card: ModelCard, header: HeaderOf) -> bytes:
    """Return the body of `GET /v1/models/{id}`."""
    return openai.model_body(card) if header(VERSION_HEADER) is None else orjson.dumps(_model(card))


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
