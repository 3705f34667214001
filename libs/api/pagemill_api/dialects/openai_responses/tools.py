"""The tools of a Responses request: how the model sees them as functions, and how its calls become the client's items.

Members of a namespace become functions `NAMESPACE__NAME`; custom tools, the local shell and a client's own search for
tools become functions with a schema of their own. Tools that run at OpenAI do not exist here: they are left out, and
`ignored_tools` names them. `items` reads earlier calls, `answer_items` writes new ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from pagemill_api.grammars.json_lark import inside_json
from pagemill_api.openai.fields import Name, RequestModel, Text, refusal
from pagemill_api.openai.tools import MAX_TOOLS
from pagemill_api.structural_tags import ConstString, Format, Grammar, SequenceFormat
from pagemill_protocol.errors import show

ToolKind = Literal["function", "custom", "local_shell", "tool_search"]
INPUT = "input"
"""The argument of a custom tool's function."""
LOCAL_SHELL, TOOL_SEARCH = "local_shell", "tool_search"
SEPARATOR = "__"
_HOSTED = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|mcp|tool_search)(_preview)?(_\d{4}_\d{2}_\d{2})?"
)
"""The types of tools that run at OpenAI, with their versions."""
_SUPPORTED = '"function", "custom", "namespace" or "local_shell"'
_COMMAND = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


class InputFormat(RequestModel):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class ToolFields(RequestModel):
    """A tool, or a member of a namespace; fields of other types of tools are repeated as they are."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    format: InputFormat | None = None


class ResponsesTool(ToolFields):
    tools: list[ToolFields] = Field([], max_length=MAX_TOOLS)
    """The members of a namespace."""


class ClientTool(NamedTuple):
    """A tool that the client runs."""

    kind: ToolKind
    name: str
    namespace: str = ""


class ToolFunction(NamedTuple):
    """A tool as a function of a chat."""

    tool: ClientTool
    place: str
    """The client's path of the tool."""
    function: dict[str, Any]
    format: InputFormat | None = None

    @property
    def name(self) -> str:
        return str(self.function["name"])

    @property
    def arguments(self) -> Format | None:
        """The form of the arguments of a custom tool with a grammar. It was checked."""
        if self.format is None or self.format.type != "grammar":
            return None
        text = _input_form(self.format)
        return SequenceFormat(elements=[ConstString(value=f'{{"{INPUT}": "'), text, ConstString(value='"}')])

    @property
    def is_plain(self) -> bool:
        """Whether a call of the function is a call of the client's tool as it is."""
        return self.tool == ClientTool("function", self.name)


def functions_of(tools: Sequence[ResponsesTool]) -> list[ToolFunction]:
    """Return the functions for the model. Raises `PydanticCustomError` for tools that neither run here nor there."""
    return [found for index, tool in enumerate(tools) for found in _functions(tool, f"tools[{index}]")]


def ignored_tools(tools: Sequence[ResponsesTool]) -> dict[str, str]:
    """Return the types of the tools that run at OpenAI, by their paths."""
    return {f"tools[{index}]": tool.type for index, tool in enumerate(tools) if _is_hosted(tool)}


def flat_name(name: str, namespace: str) -> str:
    """Return the name of the function for a member of a namespace, or of none."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def shown_tool(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as a response repeats it."""
    if tool.type != "function":
        return tool.model_dump(mode="json", exclude_unset=True)
    fields = {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}
    return {**fields, **(tool.model_extra or {})}


def _is_hosted(tool: ToolFields) -> bool:
    return _HOSTED.fullmatch(tool.type) is not None and not _is_client_search(tool)


def _is_client_search(tool: ToolFields) -> bool:
    return tool.type == TOOL_SEARCH and (tool.model_extra or {}).get("execution") == "client"


def _functions(tool: ResponsesTool, place: str) -> Iterator[ToolFunction]:
    if tool.type == "namespace":
        for index, member in enumerate(tool.tools):
            at = f"{place}.tools[{index}]"
            if member.type not in ("function", "custom"):
                raise _unsupported(member, f"{at}.type", '"function" or "custom"')
            yield _function(member, at, namespace=_name(tool, place), about=tool.description)
    elif tool.type in ("function", "custom"):
        yield _function(tool, place)
    elif tool.type == LOCAL_SHELL:
        yield _own(ClientTool("local_shell", LOCAL_SHELL), place, "Runs a command in the client's shell.", _COMMAND)
    elif _is_client_search(tool):
        about = tool.description or "Searches for tools."
        yield _own(ClientTool("tool_search", TOOL_SEARCH), place, about, tool.parameters or _QUERY)
    elif not _is_hosted(tool):
        raise _unsupported(tool, f"{place}.type", _SUPPORTED)


def _function(tool: ToolFields, place: str, *, namespace: str = "", about: str | None = None) -> ToolFunction:
    name = _name(tool, place)
    texts = [about, tool.description]
    parameters, form = tool.parameters, None
    if tool.type == "custom":
        form = tool.format
        parameters = {
            "type": "object",
            "properties": {INPUT: {"type": "string"}},
            "required": [INPUT],
            "additionalProperties": False,
        }
        if form is not None and form.type == "grammar":
            if form.syntax is None or form.definition is None:
                missing = "syntax" if form.syntax is None else "definition"
                raise refusal(f"{place}.format.{missing}", f"A grammar needs `{missing}`. Send it.")
            _check_grammar(form, f"{place}.format.definition")
            texts.append(f"`{INPUT}` conforms to this grammar ({form.syntax}):\n{form.definition}")
    description = "\n\n".join(text for text in texts if text)
    given = {"name": flat_name(name, namespace), "description": description or None, "parameters": parameters}
    function = {key: value for key, value in given.items() if value is not None}
    kind: ToolKind = "custom" if tool.type == "custom" else "function"
    return ToolFunction(
        ClientTool(kind, name, namespace), place, function | ({"strict": True} if tool.strict else {}), form
    )


def _check_grammar(form: InputFormat, field: str) -> None:
    try:
        _input_form(form)
    except ValueError as error:
        raise refusal(field, f"The grammar of `{field}` cannot be enforced: {error}.") from None


def _input_form(form: InputFormat) -> Format:
    """Return the form of the input inside a JSON string. Raises `ValueError`."""
    definition = form.definition or ""
    if form.syntax == "regex":
        definition = "start: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", definition) + "/"
    return Grammar(grammar=inside_json(definition))


def _own(tool: ClientTool, place: str, description: str, parameters: Mapping[str, Any]) -> ToolFunction:
    return ToolFunction(tool, place, {"name": tool.name, "description": description, "parameters": dict(parameters)})


def _name(tool: ToolFields, place: str) -> str:
    if tool.name is None:
        raise refusal(f"{place}.name", "A tool of this type needs `name`. Send it.", "missing_required_parameter")
    return tool.name


def _unsupported(tool: ToolFields, field: str, supported: str) -> Exception:
    return refusal(
        field,
        f"Tools of type {show(tool.type)} are not supported here. Send tools of type {supported}.",
        "unsupported_parameter",
    )
