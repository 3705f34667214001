"""Reads the lines of an input file in pieces and checks each one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import orjson

from pagemill_gateway.batches.objects import LineFault
from pagemill_protocol import nesting
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.openai.parse import parse_json

PIECE_BYTES = 256 * 1024
MAX_CUSTOM_ID_CHARS = 512
Read = Callable[[int, int], Awaitable[bytes]]
"""Reads content from an offset, up to a number of bytes; returns nothing at the end."""


class Line(NamedTuple):
    number: int
    """The line's number from 1; empty lines count."""
    custom_id: str
    model: str
    body: bytes


class BrokenLine(NamedTuple):
    number: int
    custom_id: str | None
    fault: LineFault


async def raw_lines(read: Read, max_bytes: int) -> AsyncIterator[tuple[int, bytes | None]]:
    """Yield number and text of each line that is not empty; the text is `None` if it is longer than `max_bytes`."""
    offset, number, rest, too_long = 0, 0, b"", False
    while piece := await read(offset, PIECE_BYTES):
        offset += len(piece)
        *ended, rest = (rest + piece).split(b"\n")
        for line in ended:
            number += 1
            if too_long or len(line) > max_bytes:
                yield number, None
            elif line.strip():
                yield number, line
            too_long = False
        if len(rest) > max_bytes:
            rest, too_long = b"", True
    if too_long or rest.strip():
        yield number + 1, None if too_long else rest


class LineChecker:
    """Checks the lines of one file in order."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._custom_ids: set[str] = set()

    def check(self, number: int, raw: bytes | None) -> Line | BrokenLine:
        if raw is None:
            return _broken(number, None, "line_too_long", f"The line is longer than {self._max_bytes} bytes.")
        try:
            given = parse_json(raw, max_levels=nesting.MAX_LEVELS + 1)
        except PagemillError as error:
            code = error.code if error.code == nesting.CODE else "invalid_json_line"
            return _broken(number, None, code, error.message.replace("The request body", "The line"))
        if not isinstance(given, dict):
            return _broken(number, None, "invalid_json_line", "The line is no JSON object.")
        custom_id, body = given.get("custom_id"), given.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            known = f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            return _broken(number, None, "invalid_custom_id", f"`custom_id` must be {known}.")
        if fault := self._fault(given, custom_id, body):
            return _broken(number, custom_id, *fault)
        self._custom_ids.add(custom_id)
        assert isinstance(body, dict)  # `_fault`
        model = body.get("model")
        return Line(number, custom_id, model if isinstance(model, str) else "", orjson.dumps(body))

    def _fault(self, given: dict[str, Any], custom_id: str, body: Any) -> tuple[str, str] | None:
        if custom_id in self._custom_ids:
            return "duplicate_custom_id", f"An earlier line has the `custom_id` {custom_id[:80]!r} too."
        if given.get("method", "POST") != "POST":
            return "invalid_method", "`method` must be POST."
        if given.get("url") != self._endpoint:
            return "invalid_url", f"`url` must be the batch's endpoint, {self._endpoint}."
        if not isinstance(body, dict):
            return "invalid_body", "`body` must be an object: the request."
        if body.get("stream"):
            return "invalid_body", "A line of a batch cannot be streamed. Remove `stream`."
        return None


def _broken(number: int, custom_id: str | None, code: str, message: str) -> BrokenLine:
    return BrokenLine(number, custom_id, LineFault(code, message, number))
