"""HTTP transport of a dialect: the data read beside a body, and the framing of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagemill_api.openai.render import SSE_CONTENT_TYPE

EVENT_STARTS = (b"data:", b"event:", b"id:", b":")
"""Fields of server-sent events, and comments (WHATWG HTML, section 9.2)."""


class RequestInfo(NamedTuple):
    """The HTTP request of a body."""

    path: str = ""
    """Without a trailing slash."""
    parameters: Mapping[str, str] = {}
    """Parameters of the path."""
    header: Callable[[str], str | None] = lambda name: None
    only_model: str = ""
    """The only model that the caller may use, if there is one; set for a `Transport.may_omit_model`."""


NO_REQUEST = RequestInfo()


def _complete_events(payload: bytes) -> bool:
    return payload.startswith(EVENT_STARTS) and payload.endswith(b"\n\n")


def _json_headers(body: bytes) -> Mapping[str, str]:
    return {"content-type": "application/json"}


def waiting_comment(left_s: float | None) -> bytes:
    """Return a comment of server-sent events."""
    return b": waiting\n\n" if left_s is None else b": waiting, about %d s\n\n" % max(1, round(left_s))


class Transport(NamedTuple):
    stream_type: str = SSE_CONTENT_TYPE
    is_complete: Callable[[bytes], bool] = _complete_events
    """Whether the payload of a frame ends where an event does."""
    waiting: Callable[[float | None], bytes] | None = waiting_comment
    """Returns what a stream has while its request waits, and clients skip. Its argument is the expected remaining
    seconds, if they are known; `None`: a stream has nothing of the kind."""
    body_headers: Callable[[bytes], Mapping[str, str]] = _json_headers
    """Headers of an answer that is not streamed."""
    may_omit_model: bool = False
    """Whether requests may omit the model where there is only one."""
    media_types: tuple[str, ...] = ()
    """Further media types of bodies beside JSON; none that a browser sends to foreign servers without asking."""


SSE = Transport()
NDJSON = Transport("application/x-ndjson", lambda payload: payload.endswith(b"\n"), waiting=None)
