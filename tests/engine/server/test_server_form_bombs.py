"""The engine's HTTP server refuses forms, tools and histories of excessive cost within a bounded time.

The goal is 50 ms. The fastest of some attempts counts, each with different contents because verdicts are cached. There
are more attempts if other processes use the machine, and the assertion allows for a factor. `pytest -s` prints the
times.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from waiting import WAIT_LIMIT_S, busy_factor

GOAL_MS = 50.0
FACTOR = 4
TRIES = 5
MOST_TRIES = 30
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def schema(**keywords: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": keywords}}}


def tools(number: int, name: str = "f", **function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"{name}{index}", **function}} for index in range(number)]


def chain(number: int, try_: int) -> dict[str, Any]:
    """Return objects that each require the next one, and the last one the first."""

    def link(index: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{index % number}"}}, "required": ["a"]}

    return {"$defs": {str(index): link(index + 1) for index in range(number)}, "$ref": "#/$defs/0", "title": str(try_)}


def doubling(try_: int) -> dict[str, Any]:
    first = {"type": "object", "properties": {"a": {"anyOf": [{"const": each} for each in range(40)]}}}
    rest = {f"d{n}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 9}] * 9} for n in range(1, 9)}
    return {"$defs": {"d0": first, **rest}, "$ref": "#/$defs/d8", "title": str(try_)}


def product(try_: int) -> list[dict[str, Any]]:
    return [
        {"anyOf": [{"type": "object", "properties": {f"{try_}_{i}_{j}": {"type": "integer"}}} for j in range(8)]}
        for i in range(8)
    ]


BOMBS: dict[str, tuple[Callable[[int], dict[str, Any]], int, str]] = {
    "contradictory bounds": (lambda n: schema(type="integer", minimum=n + 5, maximum=2), 400, "response_format"),
    "contradictory types": (
        lambda n: schema(allOf=[{"type": "string"}, {"type": "integer"}], title=str(n)),
        400,
        "response_format",
    ),
    "contradictory patterns": (
        lambda n: schema(allOf=[{"type": "string", "pattern": f"^{n}a+$"}, {"type": "string", "pattern": "^b+$"}]),
        400,
        "response_format",
    ),
    "itself": (lambda n: schema(**{"$ref": "#", "title": str(n)}), 400, "response_format"),
    "five hundred objects in a circle": (lambda n: schema(**chain(500, n)), 400, "response_format"),
    "options that double at each level": (lambda n: schema(**doubling(n)), 400, "response_format"),
    "a product of options": (lambda n: schema(allOf=product(n)), 400, "response_format"),
    "remainders of a large number": (
        lambda n: schema(type="integer", multipleOf=1_000_003 + n),
        400,
        "response_format",
    ),
    "remainders of several numbers": (
        lambda n: schema(allOf=[{"type": "integer", "multipleOf": each} for each in (997 + n, 991, 983)]),
        400,
        "response_format",
    ),
    "an expression that explodes": (
        lambda n: {"guided_regex": f"{n}(((x{{100}}){{100}}){{100}})"},
        400,
        "guided_regex",
    ),
    "parentheses": (lambda n: {"guided_regex": "(" * 3000 + str(n) + ")" * 3000}, 400, "guided_regex"),
    "intersections of expressions": (
        lambda n: {"guided_grammar": f"start: A\nA: /.*a.{{15}}/ & ~/.*b.{{16}}/ & /.*{n}.{{17}}/\n"},
        400,
        "guided_grammar",
    ),
    "seven megabytes of schema": (
        lambda n: schema(type="object", description=str(n) + "x" * 7_000_000),
        400,
        "response_format.json_schema.schema",
    ),
    "ten megabytes of schema": (lambda n: schema(type="object", description=str(n) + "x" * 10_000_000), 413, ""),
    "ten thousand tools": (lambda n: {"tools": tools(10_000, description=str(n))}, 400, "tools"),
    "a bomb among strict tools": (
        lambda n: {"tools": [*tools(8), *tools(1, "last", strict=True, parameters=schema_of_remainders(n))]},
        400,
        "tools[8].function.parameters",
    ),
    "a fault among strict tools": (
        lambda n: {"tools": [*tools(8), *tools(1, "last", strict=True, parameters=contradictory(n))]},
        400,
        "tools[8].function.parameters",
    ),
    "an answer of a tool without a call": (
        lambda n: {"messages": [*MESSAGES, {"role": "tool", "content": "4", "tool_call_id": f"c{n}"}]},
        400,
        "messages[1].tool_call_id",
    ),
}


LONGEST = ("remainders of several numbers", "intersections of expressions")
"""Forms that are checked until the time limit; `make test` has another one of each family."""


def schema_of_remainders(try_: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1_000_003 + try_}}}


def contradictory(try_: int) -> dict[str, Any]:
    return {"properties": {"a": {"type": "integer", "minimum": try_ + 5, "maximum": 2}}, "required": ["a"]}


@pytest.fixture(scope="module")
def client(null_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=null_server.url, timeout=WAIT_LIMIT_S) as client:
        # The first form of a server starts the process that checks forms.
        assert client.post(PATH, json=body(guided_regex="(?=a)")).status_code == 400
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "max_tokens": 4, **fields}


def fastest_ms(client: httpx.Client, make: Callable[[int], dict[str, Any]], status: int, param: str) -> float:
    took_ms: list[float] = []
    while len(took_ms) < TRIES or (min(took_ms) > GOAL_MS and len(took_ms) < MOST_TRIES):
        try_ = len(took_ms)
        raw = json.dumps(body(**make(try_))).encode()
        started_s = time.perf_counter()
        response = client.post(PATH, content=raw, headers={"content-type": "application/json"})
        took_ms.append((time.perf_counter() - started_s) * 1000)
        error = response.json()["error"]
        assert (response.status_code, error["param"] or "") == (status, param), error
        assert len(error["message"]) < 700
    return min(took_ms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb", [pytest.param(each, marks=pytest.mark.full if each in LONGEST else ()) for each in BOMBS]
)
def test_an_expensive_form_is_refused_by_its_field_within_a_bounded_time(client: httpx.Client, bomb: str) -> None:
    took_ms = fastest_ms(client, *BOMBS[bomb])
    print(f"{bomb}: {took_ms:.1f} ms (goal {GOAL_MS:g})")
    assert took_ms < GOAL_MS * FACTOR * busy_factor()


def test_other_requests_are_answered_while_expensive_forms_are_checked(client: httpx.Client) -> None:
    make, status, param = BOMBS["remainders of several numbers"]
    done = threading.Event()

    def send_bombs() -> int:
        number = 0
        while number < TRIES or not done.is_set():
            response = client.post(PATH, json=body(**make(1000 + number)))
            assert (response.status_code, response.json()["error"]["param"]) == (status, param)
            number += 1
        return number

    took_ms: list[float] = []
    with ThreadPoolExecutor(1) as threads:
        bombs = threads.submit(send_bombs)
        try:
            while len(took_ms) < TRIES or (min(took_ms) > GOAL_MS and len(took_ms) < MOST_TRIES):
                started_s = time.perf_counter()
                assert client.post(PATH, json=body()).status_code == 200
                took_ms.append((time.perf_counter() - started_s) * 1000)
        finally:
            done.set()
        print(f"beside {bombs.result()} bombs: {min(took_ms):.1f} ms, {len(took_ms)} requests")
    assert min(took_ms) < GOAL_MS * FACTOR * busy_factor()
