"""Every field of every request schema changes a request or its answer, is refused, or is listed as without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from field_cases import COUNTS, DIALECTS, ELSEWHERE, SCHEMAS, place_of
from request_outcomes import (
    EMBEDS,
    SCORES,
    Changes,
    bodies_of,
    check_field,
    merged,
    outcome,
    tokenizer_of,
    tried,
)

from pagemill_api.dialects.openai_responses.responses import StoredResponsesDialect
from pagemill_api.dialects.registry import BUILT_IN, dialects
from pagemill_api.dialects.token_counts import TOKEN_COUNTS
from pagemill_api.openai import prepare
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.unsupported import Unsupported
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError


@pytest.fixture(scope="module")
def tokenizers() -> Iterator[dict[str, Tokenizer]]:
    text = tokenizer_of()
    vectors = {"embeddings": tokenizer_of(EMBEDS), "rerank": tokenizer_of(SCORES), "score": tokenizer_of(SCORES)}
    yield {"": text, **vectors}
    text.close()


def test_every_schema_of_every_dialect_is_here() -> None:
    assert {*DIALECTS, *COUNTS, *ELSEWHERE} == set(SCHEMAS)
    assert {dialect for dialect, *_ in DIALECTS.values()} == {factory().name for factory in BUILT_IN}
    assert {path for path, *_ in COUNTS.values()} == {count.path for count in TOKEN_COUNTS}


@pytest.mark.parametrize("name", [*DIALECTS, *COUNTS])
def test_every_field_has_a_case_or_is_listed_as_without_effect(name: str) -> None:
    *_, cases = {**DIALECTS, **COUNTS}[name]
    listed = {*SCHEMAS[name].leaves()} & SCHEMAS[name].ignored().keys()
    assert sorted([*cases, *listed]) == sorted(SCHEMAS[name].leaves())
    assert all(len(reason) > 15 for reason in SCHEMAS[name].ignored().values())


@pytest.mark.parametrize("name", DIALECTS)
def test_every_case_changes_the_request_or_its_answer(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    dialect, body, cases = DIALECTS[name]
    tokenizer, place = tokenizers.get(dialect, tokenizers[""]), place_of(dialect)
    for field, case in cases.items():
        found = StoredResponsesDialect() if field == "store" else dialects()[dialect]
        plain, changed = (tried(partial(outcome, found, each, place, tokenizer)) for each in bodies_of(body, case))
        assert not isinstance(plain, PagemillError), f"{field}: {plain}"
        check_field(field, plain, changed)


@pytest.mark.parametrize("name", COUNTS)
def test_every_case_changes_the_count_or_is_refused(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    path, body, cases = COUNTS[name]
    (count,) = [each for each in TOKEN_COUNTS if each.path == path]

    def counted(given: Changes) -> Any:
        parsed = count.parse(json.dumps(given).encode())
        return parsed.model, prepare.tokenize(parsed, tokenizers[""], 5000), parsed.return_token_strs

    for field, case in cases.items():
        before, after = bodies_of(body, case)
        check_field(field, counted(before), tried(partial(counted, after)))


@pytest.mark.parametrize("name", [*DIALECTS, *COUNTS])
def test_unsupported_fields_are_refused_by_name_with_a_remedy(name: str) -> None:
    _, body, _ = {**DIALECTS, **COUNTS}[name]
    for unsupported, rule in SCHEMAS[name].UNSUPPORTED.items():
        with pytest.raises(PagemillError) as refused:
            parse_body(json.dumps({**body, unsupported: [["x"]]}).encode(), SCHEMAS[name])
        assert (refused.value.param, refused.value.code) == (unsupported, "unsupported_parameter")
        assert rule.remedy in refused.value.message
        for harmless in rule.harmless:
            parse_body(json.dumps({**body, unsupported: harmless}).encode(), SCHEMAS[name])


def test_no_field_is_in_two_lists() -> None:
    for schema in SCHEMAS.values():
        for path, each in schema.parts():
            rules: Mapping[str, Unsupported] = each.UNSUPPORTED
            assert not rules.keys() & (each.model_fields.keys() | each.IGNORED.keys()), (schema, path)


def test_fields_listed_as_without_effect_change_no_request(tokenizers: dict[str, Tokenizer]) -> None:
    values = {
        "reasoning.summary": {"reasoning": {"summary": "auto"}},
        "metadata.user_id": {"metadata": {"user_id": "a"}},
    }
    for name, (dialect, body, _) in DIALECTS.items():
        tokenizer, place = tokenizers.get(dialect, tokenizers[""]), place_of(dialect)
        plain, _ = outcome(dialects()[dialect], body, place, tokenizer)
        declared = {*SCHEMAS[name].leaves()} & SCHEMAS[name].ignored().keys()
        for field in declared:
            changes = values.get(field) or {field: SAMPLES[field]}
            assert outcome(dialects()[dialect], merged(body, changes), place, tokenizer)[0] == plain, field


SAMPLES: Changes = {
    "user": "ann",
    "stream": True,
    "max_tool_calls": 3,
    "safety_identifier": "ann",
    "prompt_cache_key": "key",
}
"""Values of declared fields without effect."""
