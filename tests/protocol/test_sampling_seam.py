"""A sampling parameter is declared once; bounds, OpenAPI entry and HTTP field follow from `SamplingParams`."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from pagemill_api.openai.schemas import SamplingFields
from pagemill_api.openapi import document
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.sampling import BOUNDS, SamplingParams

BEAM_SEARCH_ONLY = {"length_penalty", "early_stopping"}
"""Parameters that are checked with `use_beam_search` and have no effect without it."""
OF_EACH_DIALECT = {"logprobs"}
"""Parameters to which chat and completions give different types."""

OFFLINE_ONLY = {"detokenize", "output_kind"}
"""Parameters of vLLM's class for the offline API alone; HTTP has no field for them or refuses it by name."""
MADE_FROM_OTHERS = {"bad_word_token_ids"}
"""Parameters that clients do not send: these are the tokens of `bad_words`."""


def numbers() -> set[str]:
    hints = get_type_hints(SamplingParams)
    return {name for name, kind in hints.items() if {int, float} & {kind, *get_args(kind)} and kind != dict[int, float]}


def test_every_number_has_bounds() -> None:
    assert (
        numbers()
        - BEAM_SEARCH_ONLY
        - OFFLINE_ONLY
        - {
            "stop_token_ids",
            "logit_bias",
            "truncate_prompt_tokens",
        }
        == BOUNDS.keys()
    )


def test_every_parameter_is_a_field_of_requests() -> None:
    elsewhere = OF_EACH_DIALECT | MADE_FROM_OTHERS | OFFLINE_ONLY
    assert set(SamplingParams.__struct_fields__) - elsewhere <= SamplingFields.model_fields.keys()
    assert not OFFLINE_ONLY & SamplingFields.model_fields.keys()


@pytest.mark.parametrize("name", sorted(BOUNDS))
@pytest.mark.parametrize("beyond", ["below", "above", "text", "bool"])
def test_values_outside_the_bounds_are_refused_by_name(name: str, beyond: str) -> None:
    bounds = BOUNDS[name]
    number = int if bounds.is_integer else float
    values: dict[str, Any] = {
        "below": number(bounds.low) - 1,
        "above": number(bounds.high) + 1,
        "text": "1",
        "bool": True,
    }
    with pytest.raises(PagemillError) as refused:
        SamplingParams(**{name: values[beyond]}).validate()
    assert refused.value.param == name


@pytest.mark.parametrize("name", sorted(BOUNDS.keys() - OF_EACH_DIALECT))
def test_the_openapi_document_publishes_the_bounds(name: str) -> None:
    fields = json.loads(document("title", "1"))["components"]["schemas"]["ChatCompletionRequest"]["properties"][name]
    published = json.dumps(fields)
    assert f'"maximum": {json.dumps(BOUNDS[name].high)}' in published
