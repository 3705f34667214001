"""The request fields that constrain an answer's form: OpenAI's `response_format`, vLLM's `structured_outputs` and the
older `guided_*`. `structured_params` parses them; here its errors become errors of a field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, PlainValidator, WithJsonSchema, model_validator

from pagemill_api.openai.fields import refusal
from pagemill_api.openai.unknown_fields import left_at
from pagemill_api.structured_params import form, form_of, response_format
from pagemill_protocol.errors import PagemillError, show
from pagemill_protocol.request.structured_outputs import (
    MAX_OPTION_CHARS,
    MAX_OPTIONS,
    MAX_REGEX_CHARS,
    MAX_SOURCE_CHARS,
    StructuredOutputs,
)

FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
)


def _validator(name: str, read: Callable[[Any], StructuredOutputs | None]) -> PlainValidator:
    def validate(value: Any) -> StructuredOutputs | None:
        try:
            return read(value)
        except PagemillError as error:
            raise refusal((error.param or "").removeprefix(name), error.message) from None

    return PlainValidator(validate)


def _from_object(name: str, read: Callable[[Any, str], StructuredOutputs | None]) -> PlainValidator:
    def read_object(value: Any) -> StructuredOutputs | None:
        if not isinstance(value, dict):
            raise PagemillError(f"`{name}` must be an object, got {show(value)}.", param=name)
        if name == "response_format":
            _report_unread(value)
        return read(value, name)

    return _validator(name, read_object)


def _report_unread(given: dict[str, Any]) -> None:
    """Report the keys of a `response_format` that its type does not read."""
    kind = given.get("type")
    if kind == "structural_tag":  # refuses what it does not read
        return
    left_at("response_format", given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_schema" and isinstance(inner := given.get("json_schema"), dict):
        left_at("response_format.json_schema", inner, ("name", "description", "schema", "strict"))


def _guided(name: str, kind: str) -> PlainValidator:
    return _validator(name, partial(form, kind, param=name))


_SOURCE = {"type": "string", "minLength": 1, "maxLength": MAX_SOURCE_CHARS}
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}, _SOURCE]}
_REGEX = {"type": "string", "minLength": 1, "maxLength": MAX_REGEX_CHARS}
_OPTION = {"type": "string", "minLength": 1, "maxLength": MAX_OPTION_CHARS}
_CHOICE = {"type": "array", "items": _OPTION, "minItems": 1, "maxItems": MAX_OPTIONS}
_TAG = {
    "type": "object",
    "properties": {
        "structures": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"begin": {"type": "string"}, "schema": {"type": "object"}, "end": {"type": "string"}},
                "required": ["begin", "schema", "end"],
            },
        },
        "triggers": {"type": "array", "items": {"type": "string", "minLength": 1}},
    },
    "required": ["structures", "triggers"],
}
_RESPONSE_FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "schema": {"type": "object"}, "strict": {"type": "boolean"}},
            "required": ["schema"],
        },
        **_TAG["properties"],  # type: ignore[dict-item]
    },
    "required": ["type"],
}
_STRUCTURED_OUTPUTS = {
    "type": "object",
    "properties": {
        "json": _SCHEMA,
        "regex": _REGEX,
        "choice": _CHOICE,
        "grammar": _SOURCE,
        "json_object": {"type": "boolean"},
        "structural_tag": {"anyOf": [_TAG, _SOURCE]},
    },
}

_Form = StructuredOutputs | None
ResponseFormat = Annotated[_Form, _from_object("response_format", response_format), WithJsonSchema(_RESPONSE_FORMAT)]
StructuredOutputsField = Annotated[
    _Form, _from_object("structured_outputs", form_of), WithJsonSchema(_STRUCTURED_OUTPUTS)
]
GuidedJson = Annotated[_Form, _guided("guided_json", "json"), WithJsonSchema(_SCHEMA)]
GuidedRegex = Annotated[_Form, _guided("guided_regex", "regex"), WithJsonSchema(_REGEX)]
GuidedChoice = Annotated[_Form, _guided("guided_choice", "choice"), WithJsonSchema(_CHOICE)]
GuidedGrammar = Annotated[_Form, _guided("guided_grammar", "grammar"), WithJsonSchema(_SOURCE)]
StructuralTag = Annotated[
    _Form, _guided("structural_tag", "structural_tag"), WithJsonSchema({"anyOf": [_TAG, _SOURCE]})
]


class FormFields(BaseModel):
    """The request fields that constrain the output's form; at most one may be set."""

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputsField = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    structural_tag: StructuralTag = None

    @model_validator(mode="after")
    def _one_form(self) -> FormFields:
        given = [name for name in FORM_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            raise refusal(given[1], f"{names} each prescribe the answer's form. Send one of them.")
        return self

    @property
    def form(self) -> tuple[str, StructuredOutputs] | None:
        """The name of the field that is set, and its form; None if no field is set."""
        for name in FORM_FIELDS:
            found = getattr(self, name)
            if found is not None:
                return name, found
        return None
