"""The form of a chat's answer: the client's form, and forced or strict tool calls, after optional reasoning.

Schemas are checked before a model is known (`check_schemas`); the syntax of calls and reasoning follows from the
model's formats (`prescribed`). The engine compiles the form and masks tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pagemill_api.answers.call_syntax import (
    CallSyntax,
    Function,
    Schema,
    after_reasoning,
    as_json,
    calls_only,
    text_and_calls,
    with_opening,
)
from pagemill_api.answers.registry import REASONING_ENDS
from pagemill_api.grammars.schemas.reading import text_properties
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_api.structural_tags import Format, JsonSchema, Or, element_of, write_tag
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.request.structured_outputs import StructuredOutputs

_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class _Tool(NamedTuple):
    field: str
    """Path of its schema in the request."""
    name: str
    schema: Schema
    held: bool
    """Whether calls are constrained to the schema; other calls may have any arguments."""
    loose: Schema
    """A schema for any arguments."""
    is_strict: bool
    """Whether the client asks for calls that conform to the schema."""
    form: Format | None = None
    """The form of arguments in JSON, where it does not follow from a schema."""

    @property
    def fits(self) -> Schema:
        return self.schema if self.held else self.loose


def check_schemas(req: ChatCompletionRequest) -> None:
    """Refuse tools whose schemas cannot be enforced. Blocks while they are compiled. Raises `PagemillError` 400."""
    tools = _tools(req)
    for tool in tools:
        if tool.held and not _is_object(tool):
            raise invalid_field(
                f"{tool.field}.type", f'The `type` of `{tool.field}` must be "object" to constrain calls to it.'
            )
    together, fields = _together(tools)
    if together is not None:
        from pagemill_api.grammars.check import CHECKS  # imported late, since few requests need it

        CHECKS.check(together, "tools", fields)


def unheld_fields(req: ChatCompletionRequest, syntax: CallSyntax | None) -> list[str]:
    """Return the schemas of tools to which forced calls are not constrained, because they cannot be."""
    if not req.forces_calls or req.names_function or syntax is None:
        return []
    tools = _tools(req)
    return [each.field for each in tools if each.form is None and not (each.held and _can_write(each, syntax))]


def _together(tools: Sequence[_Tool]) -> tuple[StructuredOutputs | None, list[str]]:
    """Return the forms of these tools as one, if they have any, and the fields that they come from."""
    held = [each for each in tools if each.held]
    formed = [(each.field, each.form) for each in tools if each.form is not None]
    schemas: list[Format] = [JsonSchema(json_schema=dict(each.schema)) for each in held]
    fields = [*(each.field for each in held), *(field for field, _ in formed)]
    if not fields:
        return None, []
    together = Or(elements=[*schemas, *(form for _, form in formed)])
    return StructuredOutputs(structural_tag=write_tag(together)), fields


def _is_object(tool: _Tool) -> bool:
    return bool(tool.schema.get("type", "object") == "object")


def prescribed(
    req: ChatCompletionRequest, syntax: CallSyntax | None, reasoning: str, prompt: str
) -> StructuredOutputs | None:
    """Return the form of the answer to the rendered `prompt`, or None. Raises `PagemillError` 400.

    `syntax` and `reasoning`: the model's call syntax and the name of its reasoning parser.
    """
    text = req.form[1] if req.form is not None else None
    constrains = req.constrains_calls or (bool(req.call_forms) and writes_json(syntax))
    if text is None and not constrains:
        return None
    begin, end = REASONING_ENDS.get(reasoning, ("", ""))
    shown = prompt.rstrip()
    has_tools = bool(req.prompt_tools) and (syntax is not None or constrains)
    reasons = bool(end) and not shown.endswith(end)
    if not has_tools and not reasons and (syntax is None or not syntax.text_opening):
        return text
    form = with_opening(syntax, element_of(text)) if text is not None else None
    if has_tools:
        form = _with_calls(req, syntax, form)
    assert form is not None  # there are calls, or a form of the text
    if reasons:
        form = after_reasoning(begin, end, form, is_open=shown.endswith(begin))
    outputs = StructuredOutputs(structural_tag=write_tag(form))
    outputs.validate("tools" if has_tools else "response_format")
    return outputs


def _with_calls(req: ChatCompletionRequest, syntax: CallSyntax | None, text: Format | None) -> Format:
    if syntax is None:
        raise PagemillError(
            "The parser of this model's tool calls declares no syntax, so calls cannot be forced or constrained "
            'to a schema. Send `tool_choice` "auto" and tools without `strict`.',
            param="tool_choice",
            code="unsupported_parameter",
        )
    tools = _tools(req)
    functions = [Function(each.name, _arguments(each, syntax, is_alone=len(tools) == 1)) for each in tools]
    parallel = req.parallel_tool_calls and not req.names_function
    if req.forces_calls:
        return calls_only(syntax, functions, parallel=parallel)
    if text is not None:
        return Or(elements=[calls_only(syntax, functions, parallel=parallel), text])
    return text_and_calls(syntax, functions, parallel=parallel)


def writes_json(syntax: CallSyntax | None) -> bool:
    """Whether the format writes arguments as JSON."""
    return syntax is not None and syntax.arguments is as_json


def _arguments(tool: _Tool, syntax: CallSyntax, *, is_alone: bool) -> Format:
    if tool.form is not None and writes_json(syntax):
        return tool.form
    try:
        return syntax.arguments(tool.fits)
    except ValueError as error:
        if tool.held and not tool.is_strict and not is_alone:
            return _arguments(tool._replace(held=False), syntax, is_alone=is_alone)
        raise invalid_field(tool.field, f"`{tool.field}` cannot be enforced: {error}.") from None


def _can_write(tool: _Tool, syntax: CallSyntax) -> bool:
    try:
        syntax.arguments(tool.fits)
    except ValueError:
        return False
    return True


def _tools(req: ChatCompletionRequest) -> list[_Tool]:
    """Return the tools that may be called.

    A choice that forces a call of any of several tools is not refused for the schema of one that is not strict.
    """
    tools = list(_as_asked(req))
    if not req.forces_calls or len(tools) == 1 or all(each.is_strict for each in tools) or _is_compilable(tools):
        return tools
    relaxed = [each if each.is_strict or _is_compilable([each]) else each._replace(held=False) for each in tools]
    return relaxed if any(each.held for each in relaxed) else tools


def _is_compilable(tools: Sequence[_Tool]) -> bool:
    from pagemill_api.grammars.check import CHECKS

    together, _ = _together(tools)
    return all(map(_is_object, tools)) and (together is None or CHECKS.accepts(together))


def _as_asked(req: ChatCompletionRequest) -> Iterator[_Tool]:
    names = {req.names_function} if req.names_function else {each["function"]["name"] for each in req.prompt_tools}
    for index, tool in enumerate(req.tools):
        function = tool["function"]
        if function["name"] not in names:
            continue
        is_strict = bool(function.get("strict"))
        parameters = function.get("parameters")
        schema = {"type": "object", **parameters} if parameters else _NO_ARGUMENTS
        form = req.call_forms.get(function["name"])
        field = f"tools[{index}].function.{'parameters' if form is None else 'format.definition'}"
        held = req.forces_calls or is_strict
        yield _Tool(field, function["name"], schema, held, _loose(parameters), is_strict, form)


def _loose(parameters: Mapping[str, Any] | None) -> Schema:
    """Return a schema for any arguments, which only declares those that are texts: some formats write these
    differently."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {"type": "object"}
    texts: Schema = {"type": "string"}
    named = text_properties(parameters or {})
    return {"type": "object", "properties": {name: texts if name in named else {} for name in properties}}
