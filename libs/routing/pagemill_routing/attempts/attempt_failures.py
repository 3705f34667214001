"""The failure of an attempt at an engine, the meaning of an engine's refusal, and what a failure leaves for the next
attempt. Pure: the simulator judges its attempts by the same functions."""

from __future__ import annotations

import msgspec

from pagemill_protocol.errors import PagemillError
from pagemill_routing.attempts.attempts import Attempts
from pagemill_routing.attempts.engine_failures import EngineFailures
from pagemill_routing.brain.interface import Assignment, FailureKind

MAX_ERROR_BYTES = 64 * 1024
REFUSALS = frozenset({409, 429, 503})
DECLINES = frozenset({"draining", "not_ready"})
"""The codes of refusals that apply to all requests: the engine shuts down, or is loading after a restart."""
CLIENT_FAULTS = frozenset({400, 413, 422})
MAX_RETRY_AFTER_S = 120.0
SILENT = "An engine fell silent."
BROKE = "The connection to an engine broke."
TOO_SHORT = "The engine's answer ended before its last frame."


class UpstreamFailure(Exception):
    """An attempt that failed; another engine may serve the request."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.retry_after_s = retry_after_s


def garbage(error: Exception) -> UpstreamFailure:
    return UpstreamFailure("broken", f"The engine sent garbage: {error}")


def record_failure(
    failure: UpstreamFailure,
    assignment: Assignment,
    attempts: Attempts,
    engine_failures: EngineFailures,
    *,
    progressed: bool,
    is_accepted: bool,
    can_continue: bool = True,
) -> None:
    """Record a failed attempt of a request in its accounts.

    `progressed`: it brought tokens. `is_accepted`: the engine had said that it has the request. `can_continue`: another
    engine can continue behind these tokens.
    """
    if progressed and can_continue:
        attempts.progressed()
    if failure.kind == "refused":
        attempts.refused(failure.message)
    elif failure.kind in ("declined", "unreachable") or (failure.kind == "lost" and not is_accepted):
        # Several engines may be gone unnoticed, which a kept connection shows only now. A request that none of them
        # received must not use up its attempts.
        attempts.record_decline(failure.message)
    elif failure.kind in ("lost", "killed", "crashed"):
        attempts.ended(failure.message, crashed=failure.kind == "crashed")
    else:
        attempts.record_break(
            failure.message, at_fault=failure.kind == "request", fell_silent=failure.kind == "stalled"
        )
    if failure.kind != "stalled" or is_accepted:
        engine_failures.failed(assignment, failure.kind, progressed=progressed)


class _ErrorFields(msgspec.Struct):
    message: str = ""
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def parse_error(raw: bytes, status: int, otherwise: str) -> PagemillError:
    """Return the error in an engine's body, or one with the message `otherwise` if the body has another form."""
    try:
        fields = msgspec.json.decode(raw, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = _ErrorFields()
    return PagemillError(
        fields.message[:2000] or otherwise, status=status, type=fields.type, param=fields.param, code=fields.code
    )


def refusal(status: int, raw: bytes, retry_after: str | None) -> UpstreamFailure | PagemillError:
    """Return the failure for an engine's refusal, or a `PagemillError` for a request that no engine would accept."""
    error = parse_error(raw, status, "The engine refused the request.")
    error.retry_after_s = _retry_after_s(retry_after)
    if status == 503 and error.code in DECLINES:
        return UpstreamFailure("declined", error.message, error.retry_after_s)
    if status in REFUSALS:
        return UpstreamFailure("refused", error.message, error.retry_after_s)
    if status in CLIENT_FAULTS:
        return error
    return UpstreamFailure("broken", f"The engine answered {status}: {error.message}")


def link_refusal(status: int, raw: bytes, retry_after: str | None) -> UpstreamFailure:
    """Return the failure for an engine, or a server before it, that refuses the link. No client is at fault for it."""
    judged = refusal(status, raw, retry_after)
    if isinstance(judged, UpstreamFailure):
        return judged
    return UpstreamFailure("broken", f"The engine answered {status} to the request for a link: {judged.message}")


def _retry_after_s(value: str | None) -> float | None:
    try:
        return min(MAX_RETRY_AFTER_S, max(0.0, float(value))) if value is not None else None
    except ValueError:
        return None
