"""`truncation: auto` of the Responses API: a conversation beyond the context loses its oldest items, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from request_outcomes import tokenizer_of

from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError

CONTEXT = 500
USER = [{"role": "user", "content": f"question {number} " + "x" * 80} for number in range(8)]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


def prompt(tokenizer: Tokenizer, **fields: Any) -> str:
    body = ResponsesDialect().parse(json.dumps({"model": "m", "truncation": "auto", **fields}).encode())
    (request,) = body.prepare(tokenizer, Preparation(CONTEXT, "resp_1", 7), body.sampling(), None)
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def test_the_oldest_items_are_left_out_and_instructions_stay(tokenizer: Tokenizer) -> None:
    shown = prompt(tokenizer, instructions="Be brief.", input=USER)
    assert "Be brief." in shown
    kept = [number for number in range(8) if f"question {number} " in shown]
    assert kept == [*range(kept[0], 8)]
    assert 0 < kept[0] < 7
    fewer = prompt(tokenizer, instructions="Be brief.", input=USER[kept[0] :])
    assert fewer == shown
    with pytest.raises(PagemillError) as caught:
        prompt(tokenizer, instructions="Be brief.", input=USER[kept[0] - 1 :], truncation="disabled")
    assert caught.value.code == "context_length_exceeded"


def test_an_output_is_not_left_without_its_call(tokenizer: Tokenizer) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "' + "y" * 300 + '"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "the output"}
    shown = prompt(tokenizer, input=[USER[0], call, output, *USER[5:]])
    assert "the output" not in shown
    assert "question 5" in shown


def test_a_conversation_that_fits_is_whole(tokenizer: Tokenizer) -> None:
    assert prompt(tokenizer, input=USER[:2]) == prompt(tokenizer, input=USER[:2], truncation="disabled")


@pytest.mark.parametrize("items", [["x" * 600], ["a", "x" * 600]])
def test_what_cannot_be_shortened_is_refused(tokenizer: Tokenizer, items: list[str]) -> None:
    with pytest.raises(PagemillError) as caught:
        prompt(tokenizer, input=[{"role": "user", "content": text} for text in items])
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
