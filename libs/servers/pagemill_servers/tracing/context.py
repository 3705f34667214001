"""The trace of a request, and whether it is sampled: W3C's trace context, decided before any span is made."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from starlette.types import Scope

from pagemill_servers.auth import header

MAX_STATE_CHARS = 512
_SAMPLED = 1
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?"
)


class TraceContext(NamedTuple):
    trace_id: bytes
    parent_id: bytes
    """Id of the client's span; empty: the request begins the trace."""
    state: str
    """The client's `tracestate`, not interpreted."""
    sampled: bool


def trace_context(scope: Scope, sample_ratio: float) -> TraceContext:
    """Return the client's trace if it sent a valid one, with its sampling decision, else a new trace, sampled by
    ratio."""
    found = _TRACEPARENT.fullmatch(header(scope, b"traceparent") or "")
    if found is None or (found[1] == "00" and found[5]):
        trace_id = secrets.token_bytes(16)
        return TraceContext(trace_id, b"", "", int.from_bytes(trace_id[8:]) < sample_ratio * 2**64)
    state = header(scope, b"tracestate") or ""
    state = state if len(state) <= MAX_STATE_CHARS and state.isascii() else ""
    is_sampled = bool(int(found[4], 16) & _SAMPLED)
    return TraceContext(bytes.fromhex(found[2]), bytes.fromhex(found[3]), state, is_sampled)
