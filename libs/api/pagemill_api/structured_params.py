"""Parse the form of answers as clients write it: vLLM's names (`json`, `regex`, ...), schemas as objects or as text.

The HTTP dialects and the offline API share this parser. `pagemill_api.grammars.check` checks that the form can be
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pagemill_protocol.errors import invalid_field, show
from pagemill_protocol.request.structured_outputs import StructuredOutputs

_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (None, False, True),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "backend": (None, "auto", "guidance"),
}
"""Options of vLLM, with the values that Pagemill satisfies anyway."""


def StructuredOutputsParams(
    *,
    json: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
) -> StructuredOutputs:
    """Make the value of `SamplingParams(structured_outputs=...)`, with the names of vLLM's class. Raises
    `PagemillError`."""
    values = (json, regex, choice, grammar, json_object, structural_tag)
    found = form_of(dict(zip(_FIELDS, values, strict=True)), "structured_outputs")
    if found is None:
        raise invalid_field("structured_outputs", f"structured_outputs needs one of {', '.join(_FIELDS)}.")
    return found


def form_of(given: Mapping[str, Any], param: str) -> StructuredOutputs | None:
    """Return the form that is set, or None. Raises `PagemillError` (400) at a field of `param`."""
    values = {name: value for name, value in given.items() if value is not None and value is not False}
    for name, value in values.items():
        if name in _OPTIONS and value not in _OPTIONS[name]:
            raise invalid_field(f"{param}.{name}", f"`{param}.{name}` {show(value)} is not supported. Remove it.")
        if name not in _OPTIONS and name not in _FIELDS:
            raise invalid_field(
                f"{param}.{name}", f"`{param}` has no field `{name[:40]}`. Send one of {', '.join(_FIELDS)}."
            )
    names = [name for name in _FIELDS if name in values]
    if len(names) > 1:
        raise invalid_field(param, f"`{param}` has {' and '.join(names)}. Send one of them.")
    return form(names[0], values[names[0]], f"{param}.{names[0]}") if names else None


def response_format(given: Mapping[str, Any], param: str) -> StructuredOutputs | None:
    """Return the form of OpenAI's `response_format`, with vLLM's type `structural_tag`, or None for any text."""
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return form("json_object", True, param)
    if kind == "json_schema":
        inner = given.get("json_schema")
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise invalid_field(
                f"{param}.json_schema",
                f'`{param}.json_schema` must be an object such as {{"name": "answer", "schema": {{...}}}}.',
            )
        return form("json", inner["schema"], f"{param}.json_schema.schema")
    if kind == "structural_tag":
        return form("structural_tag", {key: value for key, value in given.items() if key != "type"}, param)
    kinds = "text, json_object, json_schema or structural_tag"
    raise invalid_field(f"{param}.type", f"`{param}.type` must be {kinds}, got {show(kind)}.")


def form(name: str, value: Any, param: str) -> StructuredOutputs:
    """Return the form of one of vLLM's fields. Raises `PagemillError` (400) at `param`."""
    match name:
        case "json":
            found = StructuredOutputs(json_schema=_json_text(value, param))
        case "regex" if isinstance(value, str):
            found = StructuredOutputs(regex=value)
        case "grammar" if isinstance(value, str):
            found = StructuredOutputs(grammar=value)
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str):
            found = StructuredOutputs(choice=tuple(value))
        case "json_object" if value is True:
            found = StructuredOutputs(json_object=True)
        case "structural_tag":
            found = StructuredOutputs(structural_tag=_json_text(value, param))
        case _:
            kind = {"choice": "a list of strings", "json_object": "true or false"}.get(name, "a string")
            raise invalid_field(param, f"`{param}` must be {kind}, got {show(value)}.")
    if found == StructuredOutputs():
        raise invalid_field(param, f"`{param}` is empty. Send a form, or remove it.")
    found.validate(param)
    return found


def _json_text(value: Any, param: str) -> str:
    """Return a schema as text. The order of its keys is that of the answer's keys."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise invalid_field(param, f"`{param}` must be an object, or its JSON as a string, got {show(value)}.")
    try:
        return orjson.dumps(value).decode()
    except (TypeError, orjson.JSONEncodeError) as error:
        raise invalid_field(param, f"`{param}` is not JSON: {str(error)[:200]}.") from None
