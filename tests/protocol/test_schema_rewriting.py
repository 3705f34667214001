"""JSON schemas with keywords that the compiler lacks: what may be said, and that all of it is valid for the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagemill_api.grammars.check import FormChecks
from pagemill_api.grammars.parser import fault_of, parser_limits
from pagemill_api.grammars.schemas.negation import negation
from pagemill_api.grammars.schemas.rewriting import writable
from pagemill_api.grammars.source import grammar_text
from pagemill_api.grammars.worker import ByteTokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.structured_outputs import StructuredOutputs

VOCABULARY = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
END = 256
A_OR_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CLOSED = {**A_OR_B, "additionalProperties": False}
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an unknown format is an annotation": ({"type": "string", "format": "color"}, ["red", ""], [1]),
    "a format of numbers": ({"type": "integer", "format": "int64"}, [5], ["5"]),
    "a format that the compiler lacks": ({"type": "string", "format": "json-pointer"}, ["/a/~0"], ["a", "/~2"]),
    "a format beside a pattern": ({"type": "string", "format": "text", "pattern": "^a+$"}, ["aa"], ["b"]),
    "dependencies on properties": (
        {**CLOSED, "dependencies": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "dependencies on a schema": (
        {**A_OR_B, "dependencies": {"a": {"properties": {"b": {"const": 5}}}}},
        [{"a": 1, "b": 5}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "dependentRequired": ({**CLOSED, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "dependentSchemas": ({**CLOSED, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 2}], [{"a": 1}]),
    "not of a type": ({"not": {"type": "string"}}, [1, None, [], {}], ["a"]),
    "not of a required property": ({**CLOSED, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "not of listed texts": (
        {"type": "string", "not": {"enum": ["ab", "a", "é."]}},
        ["", "b", "abc", "aa", "é", "line\nbreak", "é.."],
        ["ab", "a", "é."],
    ),
    "not of listed numbers": ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6, -9], [3, 5]),
    "not of a bound": ({"type": "integer", "not": {"minimum": 3}}, [2], [3]),
    "not of a length": ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab"]),
    "not of several": (
        {"not": {"anyOf": [{"type": "string"}, {"const": 1}, {"required": ["a"]}]}},
        [{}, {"b": 1}],
        [1, 2, "", {"a": 1}],
    ),
    "not of a set of characters": ({"type": "string", "not": {"pattern": "^[ab]+$"}}, ["", "abc"], ["ab", "a"]),
    "a property that is forbidden": ({"properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}], [{"a": 1}]),
    "not not": ({"not": {"not": {"type": "integer"}}}, [1], ["a"]),
    "oneOf by required properties": (
        {**CLOSED, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "oneOf by a constant of a reference": (
        {
            "$defs": {"k": {"const": 1}},
            "type": "object",
            "required": ["k"],
            "oneOf": [
                {"properties": {"k": {"$ref": "#/$defs/k"}}},
                {"properties": {"k": {"enum": [2, 3]}, "v": {"type": "null"}}},
            ],
        },
        [{"k": 1, "v": 5}, {"k": 2, "v": None}],
        [{"k": 2, "v": 5}, {"k": 4}],
    ),
    "oneOf with an open type": (
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]},
        ["abc"],
        ["ab", 1],
    ),
    "oneOf by beginnings": (
        {"oneOf": [{"type": "string", "pattern": "^ab-"}, {"type": "string", "pattern": "^ac-"}]},
        ["ab-1"],
        ["ad-"],
    ),
    "if and then": (
        {**CLOSED, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "if and else": (
        {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "null"}},
        ["a", None],
        ["", 1],
    ),
    "propertyNames by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "c": 2}],
        [{"d": 1}, {"a": "x"}],
    ),
    "propertyNames by lengths": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "propertyNames by a list": ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{"y": []}], [{"z": 1}]),
    "propertyNames by a reference": (
        {"$defs": {"n": {"pattern": "^x"}}, "type": "object", "propertyNames": {"$ref": "#/$defs/n"}},
        [{"x1": 1}],
        [{"y": 1}],
    ),
    "propertyNames beside properties": ({**A_OR_B, "propertyNames": {"const": "a"}}, [{"a": 1}], [{"b": 1}]),
    "propertyNames that must not be": (
        {"type": "object", "propertyNames": {"not": {"enum": ["a"]}}},
        [{"b": 1}],
        [{"a": 1}],
    ),
    "uniqueItems of a list": (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}},
        [[], ["a"], ["b"], ["a", "c"], ["a", "b", "c"]],
        [["a", "a"], ["b", "b"], ["c", "b", "c"]],
    ),
    "uniqueItems of booleans": (
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 2},
        [[True, False]],
        [[True, True], [True]],
    ),
    "uniqueItems of texts": (
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        [[], ["a"]],
        [["a", "a"], [1]],
    ),
    "uniqueItems of a tuple": (
        {
            "type": "array",
            "uniqueItems": True,
            "prefixItems": [{"type": "string"}, {"type": "integer"}],
            "items": False,
        },
        [["a", 1]],
        [["a", "a"]],
    ),
    "uniqueItems where no array is needed": (
        {"type": ["integer", "array"], "uniqueItems": True, "items": {"type": "integer"}},
        [1, [2]],
        [[2, 2], "a"],
    ),
    "minProperties of optional ones": ({**CLOSED, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    "maxProperties of optional ones": ({**CLOSED, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "a reference into what was rewritten": (
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]},
        ["a", ["b"]],
        [[1], [["a"]]],
    ),
}


def compiled(schema: Any) -> LLMatcher:
    text = grammar_text(StructuredOutputs(json_schema=json.dumps(schema)))
    matcher = LLMatcher(VOCABULARY, text, log_level=0, limits=parser_limits())
    assert fault_of(matcher) == ""
    return matcher


def fits(matcher: LLMatcher, value: Any) -> bool:
    said = json.dumps(value, ensure_ascii=False, separators=(", ", ": ")).encode()
    walked = matcher.deep_copy()
    return walked.try_consume_tokens(list(said)) == len(said) and walked.is_accepting()


def drawn(matcher: LLMatcher, seed: int) -> str | None:
    """Return a random answer, or None for one that does not end soon."""
    draw, walked, said = random.Random(seed), matcher.deep_copy(), bytearray()
    while len(said) < 400:
        mask = int.from_bytes(walked.compute_bitmask(), "little")
        if mask >> END & 1:
            return said.decode()
        allowed = [each for each in range(256) if mask >> each & 1]
        ends = [each for each in allowed if each in b'"}],:'] if draw.random() < 0.4 else []
        letters = [each for each in allowed if 0x61 <= each <= 0x7A]
        said.append(draw.choice(ends or letters or allowed))
        assert walked.consume_token(said[-1])
    return None


@pytest.mark.parametrize("name", CASES)
def test_what_is_valid_may_be_said_and_nothing_else(name: str) -> None:
    schema, valid, invalid = CASES[name]
    kind = jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    matcher = compiled(schema)
    for value in valid:
        assert validator.is_valid(value), value
        assert fits(matcher, value), value
    for value in invalid:
        assert not fits(matcher, value), value
    said = [text for seed in range(20) if (text := drawn(matcher, seed)) is not None]
    assert said
    for text in said:
        validator.validate(json.loads(text))


def test_every_schema_of_a_negation_excludes_what_the_schema_allows() -> None:
    values = [None, True, 0, 3, 2.5, "", "ab", [], [1], {}, {"a": 1}, {"a": "x", "b": None}]
    for schema, _, _ in CASES.values():
        kind = jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator
        root = {"$defs": schema.get("$defs", {})} if isinstance(schema, dict) else {}
        for broken in negation(schema, schema):
            found = {**root, "allOf": [broken]}
            for value in values:
                assert not (kind(found).is_valid(value) and kind(schema).is_valid(value)), (schema, broken, value)


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {"oneOf": {"type": "string"}}}, {"enum": [{"not": 1}]}]
)
def test_names_and_values_that_look_like_keywords_stay(schema: Any) -> None:
    assert writable(schema) == schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"type": "array", "uniqueItems": True, "minItems": 2, "items": {"type": "string"}},
            "uniqueItems with several",
        ),
        (
            {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"type": "boolean"}},
            "more items than there are",
        ),
        ({"type": "number", "not": {"multipleOf": 2}}, "not"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "may overlap"),
        ({"type": "array", "contains": {}}, "contains"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(PagemillError, match=says):
        FormChecks().check(StructuredOutputs(json_schema=json.dumps(schema)))


def test_a_schema_whose_combinations_explode_is_refused_in_time() -> None:
    options = [{"required": [f"p{at}"], "not": {"required": [f"q{at}"]}} for at in range(400)]
    with pytest.raises(PagemillError, match=r"too large|to compile|combinations"):
        FormChecks().check(StructuredOutputs(json_schema=json.dumps({"oneOf": options})))


def test_the_size_of_a_form_is_limited_by_the_setting() -> None:
    checks = FormChecks()
    form = StructuredOutputs(json_schema=json.dumps({"description": "x" * 300_000}))
    checks.check(form)
    checks = FormChecks()
    checks.max_form_chars = 1000
    with pytest.raises(PagemillError, match="at most 1000 are allowed \\(max_form_chars\\)"):
        checks.check(form)
