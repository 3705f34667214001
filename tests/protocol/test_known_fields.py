"""Every field of OpenAI's request types has an effect, or is refused by name, or is listed as ignored."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from pagemill_api.dialects.openai_responses.request import ResponsesRequest
from pagemill_api.dialects.vectors.request import EmbeddingRequest
from pagemill_api.openai.fields import RequestModel
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_protocol.errors import PagemillError

KINDS: list[tuple[Any, type[RequestModel]]] = [
    (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
]


@pytest.mark.parametrize(("theirs", "ours"), KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_openai_is_supported_refused_or_known_to_be_ignored(
    theirs: Any, ours: type[RequestModel]
) -> None:
    names = {name for key, field in ours.model_fields.items() for name in (key, field.alias)}
    assert set(get_type_hints(theirs)) - names - ours.UNSUPPORTED.keys() <= ours.ignored().keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moderation", {"model": "a"}),
        ("context_management", [{"type": "compaction"}]),
    ],
)
def test_fields_that_would_change_a_response_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PagemillError) as refused:
        parse_body(json.dumps({"model": "m", "input": "hi", field: value}).encode(), ResponsesRequest)
    assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")


def test_parts_that_never_exist_may_be_included_and_are_not_repeated() -> None:
    given = {"model": "m", "input": "hi", "include": ["reasoning.encrypted_content"], "context_management": []}
    assert "include" not in parse_body(json.dumps(given).encode(), ResponsesRequest).shown()
