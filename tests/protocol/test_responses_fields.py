"""No field of the Responses API is accepted and ignored in silence: it acts, is refused, or is named in the header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from request_outcomes import Changes, bodies_of, check_field, tokenizer_of, tried
from responses_cases import REPEATED, RESPONSE, RESPONSES

from pagemill_api.dialects.base import FinishedChoice, Preparation, unread_fields
from pagemill_api.dialects.openai_responses.request import ResponsesRequest
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.openapi import request_schemas
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import Usage

DIALECT = ResponsesDialect()
WITHOUT_EFFECT = sorted(
    {*ResponsesRequest.IGNORED, "client_metadata"}
    | {name for schema in request_schemas() for name in schema.model_fields}
    - ResponsesRequest.model_fields.keys()
    - ResponsesRequest.UNSUPPORTED.keys()
)
"""Fields without effect: those that are listed, those of other APIs, and an unknown one."""
SAMPLES: Changes = {
    "user": "ann",
    "max_tool_calls": 3,
    "safety_identifier": "ann",
    "prompt_cache_key": "key",
}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


@pytest.mark.parametrize("field", sorted(RESPONSES.keys() - REPEATED.keys()))
def test_a_field_does_more_than_being_repeated(tokenizer: Tokenizer, field: str) -> None:
    def acts(given: Changes) -> Any:
        parsed = DIALECT.parse(json.dumps(given).encode())
        (request,) = parsed.prepare(tokenizer, Preparation(500, "id-1", 7), parsed.sampling(), None)
        return msgspec.structs.replace(request, client_fields=""), parsed.unread_fields(tokenizer, ParserSettings())

    plain, changed = (tried(partial(acts, each)) for each in bodies_of(RESPONSE, RESPONSES[field]))
    check_field(field, plain, changed)


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_a_field_without_effect_is_named_in_the_header(tokenizer: Tokenizer, field: str) -> None:
    parsed = DIALECT.parse(json.dumps({**RESPONSE, field: SAMPLES.get(field, {"a": "b"})}).encode())
    assert unread_fields(parsed, tokenizer, ParserSettings()) == [field]


def test_penalties_are_repeated_as_they_act(tokenizer: Tokenizer) -> None:
    fields = {**RESPONSE, "frequency_penalty": 0.5, "presence_penalty": -0.5}
    parsed = DIALECT.parse(json.dumps(fields).encode())
    (request,) = parsed.prepare(tokenizer, Preparation(500, "id-1", 7), parsed.sampling(), None)
    assert (request.sampling.frequency_penalty, request.sampling.presence_penalty) == (0.5, -0.5)
    shown = json.loads(DIALECT.renderer(request, None).body([FinishedChoice(0, "a", "stop")], Usage(1, 1)))
    assert (shown["frequency_penalty"], shown["presence_penalty"]) == (0.5, -0.5)
