"""Values of clients in error messages: in JSON's words, never in Python's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from request_outcomes import tried

from pagemill_api.dialects.registry import dialects
from pagemill_api.openapi import request_schemas
from pagemill_protocol.errors import PagemillError, show

PYTHONS_WORDS = re.compile(r"\b(None|True|False|NoneType|dict|tuple|bool|str)\b|got '")
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
    "ollama-chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "ollama-generate": {"model": "m", "prompt": "hi"},
    "tgi": {"inputs": "hi", "parameters": {}},
    "embeddings": {"model": "m", "input": "hi"},
    "rerank": {"model": "m", "query": "a", "documents": ["b"]},
    "score": {"model": "m", "text_1": "a", "text_2": "b"},
}
WRONG: list[Any] = [True, False, 7, -1.5, "no", "it's", [], [None, True], {}, {"a": None}, [{"type": None}], [[True]]]
FIELDS = sorted({name for schema in request_schemas() for name in schema.model_fields})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        ("it's", '"it\'s"'),
        ('a"b', '"a\\"b"'),
        (2.5, "2.5"),
        (7, "7"),
        ([None], "a list of 1"),
        ({"a": True}, "an object"),
        ("x" * 50, '"' + "x" * 40 + '"...'),
        (10**400, "an integer of 1329 bits"),
    ],
)
def test_a_value_is_shown_in_jsons_words(value: object, shown: str) -> None:
    assert show(value) == shown


@pytest.mark.parametrize("name", BODIES)
def test_no_dialect_answers_a_wrong_value_in_pythons_words(name: str) -> None:
    """Each field of any schema, with values of each kind."""
    found = {each.name: each for each in dialects().values()}[name]
    refused = 0
    for field in FIELDS:
        for value in WRONG:
            body = json.dumps({**BODIES[name], field: value}).encode()
            error = tried(lambda body=body: found.parse(body).sampling())  # type: ignore[misc]
            if isinstance(error, PagemillError):
                refused += 1
                assert not PYTHONS_WORDS.search(error.message), (field, value, error.message)
    assert refused > 10
