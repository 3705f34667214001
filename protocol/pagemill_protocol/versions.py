"""Which version of the internal protocol a process speaks, and which peers it works together with.

Engine, gateway and operator of releases N and N-1 run side by side in every upgrade and rollback. Each names its
version in the header `x-pagemill-protocol` of requests and answers, and refuses peers older than `OLDEST_VERSION`. A
newer one is never refused: that one knows us, we cannot know it. What may change without another version is said in
docs/adr/0067-versions-of-the-protocol.md. The messages are `generate`'s, `state`'s, `load`'s and `catalog`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagemill_protocol.errors import PagemillError

FIRST_VERSION = 1
"""Of peers that name none: releases before the header."""
PROTOCOL_VERSION = 1
"""What this release speaks."""
OLDEST_VERSION = 1
"""The version of the release before this one."""
PROTOCOL_HEADER = "x-pagemill-protocol"
MAX_DIGITS = 6


class UnsupportedProtocol(Exception):
    """A peer cannot be worked with; the message names it, both versions and the remedy."""


def protocol_headers() -> dict[str, str]:
    """For requests to a peer, and for answers to it."""
    return {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}


def stream_headers(content_type: str) -> list[tuple[bytes, bytes]]:
    """Of an answer that is an endless stream for a peer."""
    named = {"content-type": content_type, **protocol_headers()}
    return [(name.encode(), value.encode()) for name, value in named.items()]


def check_peer(peer: str, headers: Mapping[str, str]) -> int:
    """The version that a peer names in its headers. Raises `UnsupportedProtocol`. `peer`: for people."""
    return _check(peer, headers.get(PROTOCOL_HEADER, ""))


def require_protocol(headers: Iterable[tuple[bytes, bytes]], peer: str) -> int:
    """As `check_peer`, for the headers of a request, in lower case. Raises `PagemillError` (426)."""
    values = [value for name, value in headers if name == PROTOCOL_HEADER.encode()]
    try:
        return _check(peer, values[0].decode("latin-1") if values else "")
    except UnsupportedProtocol as error:
        raise PagemillError(str(error), status=426, code="unsupported_protocol") from None


def _check(peer: str, text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise UnsupportedProtocol(f"{peer} names the protocol version {text[:40]!r}, which is no number.")
    version = int(text) if text else FIRST_VERSION
    if version < OLDEST_VERSION:
        raise UnsupportedProtocol(
            f"{peer} speaks version {version} of the protocol, and this release the versions {OLDEST_VERSION} to "
            f"{PROTOCOL_VERSION}. Upgrade it by one minor version at a time."
        )
    return version
