"""Routes that count a prompt's tokens, one for each dialect that has one: a body becomes a `TokenizeRequest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import orjson

from pagemill_api.dialects.anthropic.messages import read_count
from pagemill_api.dialects.openai_responses.responses import read_count as read_responses_count
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.render import tokenize_body
from pagemill_api.openai.schemas import TokenizeRequest


class TokenCount(NamedTuple):
    path: str
    parse: Callable[[bytes], TokenizeRequest]
    """Parses a body. Raises `PagemillError` 400."""
    body: Callable[[list[int], int, list[str] | None], bytes]
    """Makes the body from token ids, the model's context length, and the tokens' texts if they were asked for."""


def _input_tokens(token_ids: list[int], max_model_len: int, texts: list[str] | None) -> bytes:
    return orjson.dumps({"input_tokens": len(token_ids)})


def _response_tokens(token_ids: list[int], max_model_len: int, texts: list[str] | None) -> bytes:
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(token_ids)})


TOKEN_COUNTS = (
    TokenCount("/tokenize", lambda raw: parse_body(raw, TokenizeRequest), tokenize_body),
    TokenCount("/v1/messages/count_tokens", read_count, _input_tokens),
    TokenCount("/v1/responses/input_tokens", read_responses_count, _response_tokens),
)
