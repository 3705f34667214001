"""Parses the lines of each kind of trace: a line's request, or what was expected instead.

The first line of a file determines its kind. Lengths and times only: no trace holds text.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

MOST_TOKENS = 100_000_000
"""Most tokens of a request; a larger number is no valid length."""
GENERATION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})


class TraceRow(NamedTuple):
    """One request. Without output tokens it failed when it was recorded."""

    at_s: float
    """Time in seconds of any clock."""
    num_prompt_tokens: int
    num_output_tokens: int
    session: str | None = None


class Broken(ValueError):
    """An invalid line; the message says what was expected."""


class TraceKind(NamedTuple):
    name: str
    parse: Callable[[str], TraceRow | None]
    """Returns None if the line is about something else. Raises `Broken`."""
    has_header: bool
    is_in_order: bool
    """Whether lines are in order of arrival, so that the first lines are the first requests."""


def recognize(first: str) -> TraceKind | None:
    """Return the kind by the first non-empty line, or None."""
    return _azure(first) or _burstgpt(first) or _recording(first)


KNOWN = (
    "a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure) or Timestamp, Request tokens, "
    "Response tokens (BurstGPT), or the JSON lines of a gateway's log"
)


def _azure(first: str) -> TraceKind | None:
    """Recognize Azure's public traces of LLM inference, of 2023 (Splitwise) and later (with the offset from UTC)."""
    columns = _columns(first, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    if columns is None:
        return None

    def parse(line: str) -> TraceRow:
        moment, prompt, output = _fields(line, columns)
        return TraceRow(_moment_s(moment), _tokens("ContextTokens", prompt), _tokens("GeneratedTokens", output))

    return TraceKind("Azure LLM inference trace", parse, has_header=True, is_in_order=True)


def _burstgpt(first: str) -> TraceKind | None:
    """Recognize BurstGPT (Wang et al., arXiv 2401.17644); since release 2.0 it has a column for the session."""
    columns = _columns(first, ("Timestamp", "Request tokens", "Response tokens"))
    if columns is None:
        return None
    session_column = _columns(first, ("Session ID",))

    def parse(line: str) -> TraceRow:
        moment, prompt, output = _fields(line, columns)
        session = _fields(line, session_column)[0].strip() if session_column else ""
        at_s = _seconds("Timestamp", moment)
        return TraceRow(at_s, _tokens("Request tokens", prompt), _tokens("Response tokens", output), session or None)

    return TraceKind("BurstGPT trace", parse, has_header=True, is_in_order=True)


def _recording(first: str) -> TraceKind | None:
    """Recognize a gateway's log with a line per ended request, whatever `kubectl logs` puts in front of it."""
    try:
        is_one = "event" in _object(first)
    except Broken:
        return None
    return TraceKind("gateway's log", _logged, has_header=False, is_in_order=False) if is_one else None


def _logged(line: str) -> TraceRow | None:
    values = _object(line)
    if values.get("event") != "request" or values.get("route") not in GENERATION_ROUTES:
        return None
    # Zero numbers are omitted from the line.
    prompt, output = (_tokens(name, values.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))
    return TraceRow(_seconds("arrived_at", values.get("arrived_at")), prompt, output)


def _object(line: str) -> dict[str, object]:
    try:
        values = json.loads(line[max(0, line.find("{")) :])
    except (ValueError, RecursionError):
        raise Broken("expected a JSON object") from None
    if not isinstance(values, dict):
        raise Broken("expected a JSON object")
    return values


def _columns(header: str, wanted: Sequence[str]) -> list[int] | None:
    """Return the positions of the columns; None if the header lacks one."""
    try:
        names = [name.strip() for name in next(csv.reader([header]))]
    except (csv.Error, StopIteration):
        return None
    return [names.index(name) for name in wanted] if set(wanted) <= set(names) else None


def _fields(line: str, columns: Sequence[int]) -> list[str]:
    try:
        fields = next(csv.reader([line], strict=True))
    except (csv.Error, StopIteration):
        raise Broken("expected comma-separated fields") from None
    if len(fields) <= max(columns):
        raise Broken(f"expected at least {max(columns) + 1} fields, got {len(fields)}")
    return [fields[column] for column in columns]


def _moment_s(text: str) -> float:
    """Return the time in seconds; times without an offset are taken as UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise Broken(f"expected TIMESTAMP as in 2023-11-16 18:15:46.68, got {_shown(text)}") from None


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < 1e12:
        raise Broken(f"expected {name} in seconds, got {_shown(value)}")
    return seconds


def _tokens(name: str, value: object) -> int:
    """Return a whole number, also from text. Raise `Broken`."""
    text = value.strip() if isinstance(value, str) else ""
    number = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if text.isascii() and text.isdigit() and len(text) <= len(str(MOST_TOKENS)):
        number = int(text)
    if not 0 <= number <= MOST_TOKENS:
        raise Broken(f"expected {name} as a whole number of 0 to {MOST_TOKENS:,}, got {_shown(value)}")
    return number


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
