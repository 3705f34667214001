"""Reads the clients of this folder from their scripts without importing them: packages, versions and checks.

The runner and the reference page `docs/reference/clients.md` use it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PINNED = re.compile(r'^# dependencies = \["([\w-]+)(?:\[\w+\])?==([\d.]+)"', re.MULTILINE)
NEEDS_PYTHON = re.compile(r'^# requires-python = ">=(3\.\d+)"', re.MULTILINE)


class Checked(NamedTuple):
    name: str
    limit: str
    """The reason why the client cannot pass the check; empty if it passes."""


class Client(NamedTuple):
    name: str
    script: Path
    package: str
    version: str
    about: str
    least_python: str
    """The first release of Python that the client supports; empty if it supports all that Pagemill does."""
    checks: tuple[Checked, ...]


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
        "the right names and arguments that fit the schema, and streams contain all events. "
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
    pinned = PINNED.search(text)
    if pinned is None:
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
    about = " ".join((ast.get_docstring(tree) or "").split())
    needs = NEEDS_PYTHON.search(text)
    least_python = needs[1] if needs else ""
    return Client(script.stem.removeprefix("check_"), script, pinned[1], pinned[2], about, least_python, checks)


def _values(call: ast.Call) -> tuple[ast.expr, ast.expr]:
    limits = [keyword.value for keyword in call.keywords if keyword.arg == "limit"]
    return call.args[0], limits[0] if limits else ast.Constant("")
