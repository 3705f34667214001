"""Reads the clients of this folder from their scripts without importing them: packages, versions and checks.

A script's header pins a package of Python, or with `[tool.pagemill] npm` one of npm, perhaps with others (`beside`),
whose programs the script finds in the folder `PAGEMILL_NPM`; with `go` a module or `rust` a crate, whose program in the
folder of that name is built as `PAGEMILL_PROGRAM`. An agent's script has `ANSWERS`: what the model says to it, one
answer after each result of a tool; objects in them are calls.

The runner and the reference page `docs/reference/clients.md` use it.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
PINNED = re.compile(r'^# dependencies = \["([\w-]+)(?:\[\w+\])?==([\d.]+)"', re.MULTILINE)
PINNED_ELSEWHERE = re.compile(r'^# (npm|go|rust) = "(@?[\w./-]+)@v?([\d.]+)"', re.MULTILINE)
BESIDE_OF_NPM = re.compile(r"^# beside = (\[[^\]]*\])", re.MULTILINE)
NEEDS_PYTHON = re.compile(r'^# requires-python = ">=(3\.\d+)"', re.MULTILINE)


class Checked(NamedTuple):
    name: str
    limit: str
    """The reason why the client cannot pass the check; empty if it passes."""


class Call(NamedTuple):
    """A call of a tool in an answer."""

    name: str
    arguments: str
    """As JSON."""


class Client(NamedTuple):
    name: str
    script: Path
    package: str
    version: str
    about: str
    least_python: str
    """The first release of Python that the client supports; empty if it supports all that Pagemill does."""
    checks: tuple[Checked, ...]
    language: str = "python"
    """Whose packages it is of: "python", "npm", "go" or "rust"."""
    answers: tuple[tuple[str | Call, ...], ...] = ()
    """What the model says to an agent; empty for clients that use the embedded model."""
    beside: tuple[str, ...] = ()
    """Further packages of npm, pinned, that the script uses with the client's."""


def clients() -> list[Client]:
    return [_read(script) for script in sorted(FOLDER.glob("check_*.py"))]


def page(note: str) -> str:
    rows = [
        f"| **{client.package}** {client.version}<br>{_about(client)} | {_works(client)} | {_limits(client)} |"
        for client in clients()
    ]
    about = (
        "Clients that `make clients` runs against a gateway and an engine with the embedded model, each in an "
        "environment of its own. The checks test the form of answers, not their content: types are valid, calls have "
        "the right names and arguments that fit the schema, and streams contain all events. Agents talk to a model "
        "with a context of 32,768 tokens that says a given text, a given call, and a text after its result. "
        "[How to use yours](../how-to/use-your-client.md)."
    )
    head = ["| Client | Works | Does not work, and why |", "|---|---|---|"]
    return "\n".join([f"# Clients\n\n{note}\n\n{about}\n", *head, *rows, ""])


def _about(client: Client) -> str:
    return f"{client.about} Needs Python {client.least_python}." if client.least_python else client.about


def _works(client: Client) -> str:
    return "; ".join(each.name for each in client.checks if not each.limit)


def _limits(client: Client) -> str:
    return "; ".join(f"{each.name}: {each.limit}" for each in client.checks if each.limit) or "-"


def _read(script: Path) -> Client:
    text = script.read_text()
    language, package, version = "python", "", ""
    if elsewhere := PINNED_ELSEWHERE.search(text):
        language, package, version = elsewhere.groups()
    elif pinned := PINNED.search(text):
        package, version = pinned.groups()
    else:
        raise ValueError(f"{script.name} pins no version: begin its `dependencies` with NAME==VERSION.")
    tree = ast.parse(text)
    calls = [
        decorator
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "check"
    ]
    checks = tuple(Checked(*(ast.literal_eval(value) for value in _values(call))) for call in calls)
    if language in ("go", "rust"):
        of_programs = ast.parse((FOLDER / "built_program.py").read_text())
        checks = tuple(Checked(each, "") for each in _assigned(of_programs, "CHECKS").values())
    about = " ".join((ast.get_docstring(tree) or "").split())
    needs = NEEDS_PYTHON.search(text)
    least_python = needs[1] if needs else ""
    name = script.stem.removeprefix("check_")
    beside = BESIDE_OF_NPM.search(text)
    client = Client(name, script, package, version, about, least_python, checks, language, _answers(tree))
    return client if beside is None else client._replace(beside=tuple(json.loads(beside[1].replace("\n#", ""))))


def _answers(tree: ast.Module) -> tuple[tuple[str | Call, ...], ...]:
    return tuple(tuple(map(_said, answer)) for answer in _assigned(tree, "ANSWERS") or ())


def _assigned(tree: ast.Module, name: str) -> Any:
    """Return the literal of an annotated assignment, or None if there is none."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
            return ast.literal_eval(node.value)
    return None


def _said(part: Any) -> str | Call:
    return part if isinstance(part, str) else Call(part["name"], json.dumps(part["arguments"]))


def _values(call: ast.Call) -> tuple[ast.expr, ast.expr]:
    limits = [keyword.value for keyword in call.keywords if keyword.arg == "limit"]
    return call.args[0], limits[0] if limits else ast.Constant("")
