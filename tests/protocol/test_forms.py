"""Forms of answers as clients write them, and forms that are refused before an engine compiles them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill_api.grammars.check import FormChecks
from pagemill_api.grammars.endless import is_endless
from pagemill_api.grammars.limits import expanded_size
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.prepare import sampling_of
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_api.sandbox.process import ProcessLimits
from pagemill_api.structured_params import StructuredOutputsParams
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]}


@pytest.fixture(scope="module")
def checks() -> FormChecks:
    return FormChecks()


def parsed(**fields: Any) -> StructuredOutputs | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return sampling_of(parse_body(json.dumps(body).encode(), ChatCompletionRequest)).structured_outputs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutputs(json_schema=SCHEMA_TEXT),
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, StructuredOutputsParams(structural_tag=TAG)),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, StructuredOutputs(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": "start: /a/"}}, StructuredOutputs(grammar="start: /a/")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"structural_tag": TAG}}, StructuredOutputsParams(structural_tag=TAG)),
        ({"guided_json": SCHEMA}, StructuredOutputs(json_schema=SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=("a",))),
        ({"guided_grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
    ],
)
def test_every_notation_of_a_form_is_read(fields: dict[str, Any], expected: StructuredOutputs | None) -> None:
    assert parsed(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
    ],
)
def test_an_invalid_form_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PagemillError) as refused:
        parsed(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){3}", 6),
        ("((a{2}b){3}c){4}", 40),
        ("[a-z{]{5}x", 6),
        (r"\d{3}\{9", 5),
        ("a{2,5}", 5),
    ],
)
def test_the_size_of_an_expression_includes_its_repetitions(pattern: str, size: int) -> None:
    assert expanded_size(pattern) == size


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"$ref": "#"}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, False),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, False),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#/anyOf/1"}]}]}, True),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, True),
        ({"$defs": {"a": {"type": "string"}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}, False),
    ],
)
def test_schemas_without_a_finite_value_are_detected(schema: Any, endless: bool) -> None:
    assert is_endless(schema) == endless


def test_a_chain_of_required_schemas_is_refused_before_it_is_compiled(checks: FormChecks) -> None:
    links = {
        str(index): {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{index + 1}"}}, "required": ["a"]}
        for index in range(500)
    }
    schema = {"$defs": {**links, "500": {}}, "$ref": "#/$defs/0"}
    with pytest.raises(PagemillError, match="require the next one"):
        checks.check(StructuredOutputs(json_schema=json.dumps(schema)))


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    checks = FormChecks()
    checks.check(StructuredOutputs(regex="a+"))
    idle = checks._idle[0]._process
    idle.kill()
    idle.wait()
    checks.check(StructuredOutputs(regex="b+"))


def test_compiling_has_a_time_limit_and_the_next_form_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FormChecks(ProcessLimits(cpu_limit_s=0.1, wall_limit_s=60.0))
    bomb = StructuredOutputs(json_schema='{"type": "integer", "multipleOf": 9973, "allOf": [{"multipleOf": 9967}]}')
    with pytest.raises(PagemillError, match="s to compile"):
        slow.check(bomb)
    with monkeypatch.context() as patched:
        patched.setattr(slow, "_run", lambda form: pytest.fail("the verdict must be cached"))
        with pytest.raises(PagemillError, match="s to compile"):
            slow.check(bomb)
    slow.check(StructuredOutputs(regex="a+"))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json_schema": "{"}, "Expecting property name"),
        ({"json_schema": "[]"}, "must be an object"),
        ({"json_schema": '{"type":"integer","multipleOf":1000003}'}, "at most 10000 are allowed"),
        ({"json_schema": '{"type":"string","minLength":5,"maxLength":2}'}, "minLength"),
        ({"json_schema": '{"$ref":"#/$defs/none"}'}, "does not exist"),
        ({"json_schema": '{"$ref":"https://example.com/schema"}'}, "example.com"),
        ({"json_schema": '{"oneOf":[{"type":"integer"},{"type":"number"}]}'}, "options of oneOf may overlap"),
        ({"json_schema": json.dumps({"const": "x" * 9000})}, "at most 8192"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "x{99999}"}, "lower the counts"),
        ({"grammar": "start: unknown"}, "unknown"),
        ({"grammar": "root ::= ("}, "not GBNF"),
        ({"structural_tag": '{"structures": []}'}, "structures"),
        (
            {"structural_tag": '{"structures":[{"begin":"a","schema":{},"end":""}],"triggers":["b"]}'},
            "none of the triggers",
        ),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_with_the_cause(
    checks: FormChecks, form: dict[str, str], reason: str
) -> None:
    with pytest.raises(PagemillError, match=reason) as refused:
        checks.check(StructuredOutputs(**form), "guided")
    assert refused.value.param == "guided"
    assert "<" not in refused.value.message.replace("<a>", "")


def test_common_forms_are_accepted(checks: FormChecks) -> None:
    for form in (
        StructuredOutputs(json_object=True),
        StructuredOutputs(choice=("é", 'with "quotes"', "line\nbreak")),
        StructuredOutputs(regex=r"\w+@\w+\.com"),
        StructuredOutputs(grammar='root ::= "yes" | "no"'),
        StructuredOutputs(structural_tag=json.dumps(TAG)),
    ):
        checks.check(form)
