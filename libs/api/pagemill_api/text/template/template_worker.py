"""The process that runs chat templates, apart from the server because a template is a program of the model's author.

`chat_template` starts it as a plain script: it imports the standard library, jinja2, `sandbox` and
`plain_program` only. It reads a setup frame, then answers one frame with one frame until its input ends.

It is confined before it runs anything, and each render is timed (`sandbox`). Templates get the environment of
Hugging Face templates: an immutable sandbox, trimmed blocks, `raise_exception`, `strftime_now`, `tojson` without HTML
escaping, loop controls, and `generation` blocks that print their body.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import sys
from typing import Any

import jinja2
import jinja2.debug  # jinja2 loads it lazily, which would fail in the sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemill_api.sandbox.confine import enter_sandbox, read_frame, timed, write_frame
from pagemill_api.text.template.plain_program import plain_program

MAX_MESSAGE_CHARS = 500
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""An object's address in memory as Python prints it; never shown to clients."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 the attribute of the base class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateRefusal(Exception):
    """The template called `raise_exception`."""


class OutputTooLong(Exception):
    pass


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class Arguments(dict):  # type: ignore[type-arg]
    """A call's arguments: an object for templates that iterate or `tojson` it, JSON text for those that print it."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": Arguments(call["function"]["arguments"])}}
        if isinstance(call.get("function"), dict) and isinstance(call["function"].get("arguments"), dict)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _prepared(variables: dict[str, Any]) -> dict[str, Any]:
    messages = [_with_arguments(each) if each.get("tool_calls") else each for each in variables["messages"]]
    return {**variables, "messages": messages}


class TemplateWorker:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._cpu_limit_s: float = setup["cpu_limit_s"]
        self._wall_limit_s: float = setup["wall_limit_s"]
        self._max_output_chars: int = setup["max_output_chars"]
        self._environment = make_environment()
        self._templates: dict[str, jinja2.Template] = {}

    def compile(self, sources: dict[str, str]) -> dict[str, str]:
        """Compile each template. Returns the errors by template name."""
        errors = {}
        for name, source in sources.items():
            try:
                self._templates[name] = self._environment.from_string(source)
            except (jinja2.TemplateSyntaxError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
                errors[name] = _describe(error)
        return errors

    def plain_programs(self, sources: dict[str, str]) -> dict[str, Any]:
        """Return plain programs by template name, of the templates that compile and have one."""
        found = {name: plain_program(self._environment.parse(sources[name])) for name in self._templates}
        return {name: program for name, program in found.items() if program is not None}

    def render(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"text": self._render(self._templates[request["name"]], _prepared(request["variables"]))}
        except TemplateRefusal as refusal:
            return {"refusal": _ADDRESS.sub("", str(refusal))[:MAX_MESSAGE_CHARS]}
        except OutputTooLong:
            return {"error": f"the prompt grows longer than {self._max_output_chars} characters"}
        except MemoryError:
            return {"error": "it needs too much memory"}
        except Exception as error:  # a template can raise anything
            return {"error": _describe(error)}

    def _render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        left = self._max_output_chars
        for piece in template.generate(variables):
            left -= len(piece)
            if left < 0:
                raise OutputTooLong
            pieces.append(piece)
        return "".join(pieces)

    def timed(self) -> contextlib.AbstractContextManager[None]:
        return timed(self._cpu_limit_s, self._wall_limit_s)


def _describe(error: BaseException) -> str:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return _ADDRESS.sub("", f"{type(error).__name__}: {error}{line}")[:MAX_MESSAGE_CHARS]


def _enter_sandbox(memory_bytes: int) -> None:
    make_environment().from_string("{{ strftime_now('%d %b %Y') }}{{ x | tojson }}").render(x={"warm": 1})
    enter_sandbox(memory_bytes)


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    _enter_sandbox(setup["memory_bytes"])
    worker = TemplateWorker(setup)
    with worker.timed():
        errors = worker.compile(setup["sources"])
        plain = worker.plain_programs(setup["sources"])
    write_frame(replies, {"errors": errors, "plain": plain})
    while (request := read_frame(requests)) is not None:
        with worker.timed():
            reply = worker.render(request)
        write_frame(replies, reply)


if __name__ == "__main__":
    main()
