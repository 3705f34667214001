"""What gateways and engines' servers both do with a parsed body once the model is known."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from request_outcomes import EMBEDS, tokenizer_of

from pagemill_api.dialects.base import ParsedBody, parsed
from pagemill_api.dialects.preparing import Prepared, preparation_now, prepared, sampling_for
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings


def body_of(**fields: Any) -> ParsedBody:
    return parsed(dialect_of("completions"), json.dumps({"model": "m", "prompt": "a", **fields}).encode())


def requests_of(body: ParsedBody, tokenizer: Tokenizer) -> Prepared:
    preparation = preparation_now(dialect_of("completions"), 5000, "salt", ParserSettings(), 1000)
    return prepared(body, tokenizer, preparation, sampling_for(body, tokenizer), None, iter(range(7, 99)).__next__)


def test_each_prompt_without_a_seed_gets_one_of_its_own() -> None:
    tokenizer = tokenizer_of()
    drawn = requests_of(body_of(prompt=["a", "a"]), tokenizer).requests
    assert [each.sampling.seed for each in drawn] == [7, 8]
    given = requests_of(body_of(prompt=["a", "a"], seed=3), tokenizer).requests
    assert [each.sampling.seed for each in given] == [3, 3]
    assert {each.cache_salt for each in (*drawn, *given)} == {"salt"}


def test_fields_without_effect_are_named() -> None:
    assert requests_of(body_of(colour="red"), tokenizer_of()).unread_fields == ["colour"]


def test_the_models_defaults_apply_whether_or_not_the_sampling_was_checked_before() -> None:
    plain = tokenizer_of()
    hot = Tokenizer(msgspec.structs.replace(plain.bundle, sampling_defaults={"temperature": 0.25}))
    body = body_of()
    checked = body.sampling()
    assert sampling_for(body, hot, checked).temperature == sampling_for(body, hot).temperature == 0.25
    assert sampling_for(body, plain, checked) == sampling_for(body, plain) == checked


@pytest.mark.parametrize("checks", [True, False])
def test_what_a_model_cannot_do_is_refused_for_both(checks: bool) -> None:
    for body, tokenizer in ((body_of(), tokenizer_of(EMBEDS)), (body_of(stop_token_ids=[10**6]), tokenizer_of())):
        with pytest.raises(PagemillError) as refused:
            sampling_for(body, tokenizer, body.sampling() if checks else None)
        assert refused.value.status == 400
