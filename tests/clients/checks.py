"""Shared code of the scripts in this folder: named checks of a client, run in order and reported as JSON lines.

A script is started as `check_NAME.py BASE_URL` in an environment that has the client and none of the project's
packages. Checks test the form of answers, because the model is too small to be right. `limit=` marks a check that does
not pass, with the reason; it must fail, with `shows` in its error, so that the reference page made from these lines
stays true.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

MODEL = "smollm2"
EMBEDDING_MODEL = "encoder"
KEY = "none"
MAX_TOKENS = 100
"""Sufficient for a `City`, as text or as one call."""
TEXT_TOKENS = 16
QUESTION = "Paris is the capital of France. It has 2 million people."
JSON_QUESTION = """Write each city as JSON.
Rome has 3 million people.
{"name": "Rome", "people": 3000000}
Berlin has 4 million people.
{"name": "Berlin", "people": 4000000}
Paris has 2 million people."""
"""For forms that require JSON without a schema: the model continues the examples and ends its answer."""
DOCUMENTED_URL = "http://127.0.0.1:8080/v1"
HOWTOS = Path(__file__).parents[2] / "docs" / "how-to"
HOWTO = HOWTOS / "use-your-client.md"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


CITY_SCHEMA: dict[str, Any] = {**City.model_json_schema(), "additionalProperties": False}
CITY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "record_city", "description": "Record a city", "parameters": CITY_SCHEMA},
}


class Check(NamedTuple):
    name: str
    limit: str
    shows: str
    function: Callable[[], Any]


CHECKS: list[Check] = []


def base_url() -> str:
    """Return the URL of the server's OpenAI API, with `/v1`."""
    return sys.argv[1]


def check(name: str, *, limit: str = "", shows: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.append(Check(name, limit, shows, function))
        return function

    return register


def run_howto(heading: str) -> dict[str, Any]:
    """Run the example below a heading of the how-to with this server; return the names that it defines."""
    match = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", HOWTO.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None, heading
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        exec(match[1].replace(DOCUMENTED_URL, base_url()), names)
    return names


def assert_embeddings(vectors: Any, count: int = 2) -> None:
    """Check that the vectors of different texts have equal lengths, norm 1, and different values."""
    assert len(vectors) == count, vectors
    assert len({len(vector) for vector in vectors}) == 1
    for vector in vectors:
        assert math.isclose(sum(value * value for value in vector), 1, abs_tol=1e-4)
    assert count == 1 or list(vectors[0]) != list(vectors[1])


def report_all() -> None:
    """Print one JSON line for each check: its name, its limit, its seconds, and its error."""
    for each in CHECKS:
        start = time.perf_counter()
        error = _error_of(each.function)
        if each.limit and not error:
            error = "It works now; remove its `limit`."
        elif each.limit and each.shows in error:
            error = ""
        seconds = round(time.perf_counter() - start, 1)
        print(json.dumps({"name": each.name, "limit": each.limit, "seconds": seconds, "error": error}), flush=True)


def _error_of(function: Callable[[], Any]) -> str:
    try:
        asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
    except Exception:
        return traceback.format_exc()
    return ""
