"""The version of the internal protocol that a process speaks, and the peers with which it works.

Engine, gateway and operator of releases N and N-1 run side by side in every upgrade and rollback. Each names its
version in the header `x-pagemill-protocol` of requests and answers, and refuses peers older than `OLDEST_VERSION`. A
newer peer is never refused: it knows this version, while this process cannot know the newer one.
docs/adr/0067-versions-of-the-protocol.md says which changes need no new version. The messages are defined in
`generate`, `state`, `load` and `catalog`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagemill_protocol.errors import PagemillError

PROTOCOL_VERSION = 1
"""Version of this release."""
OLDEST_VERSION = 1
"""Version of the previous release."""
PROTOCOL_HEADER = "x-pagemill-protocol"
MAX_DIGITS = 6


class UnsupportedProtocol(Exception):
    """A peer whose version is not supported; the message names the peer, both versions and the remedy."""


def protocol_headers() -> dict[str, str]:
    """Return the headers for requests to a peer and answers to it."""
    return {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}


def stream_headers(content_type: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that is an endless stream for a peer."""
    named = {"content-type": content_type, **protocol_headers()}
    return [(name.encode(), value.encode()) for name, value in named.items()]


def check_peer(peer: str, headers: Mapping[str, str]) -> int:
    """Return the version that a peer names in its headers. Raises `UnsupportedProtocol`. `peer`: its name in
    messages."""
    return _check(peer, headers.get(PROTOCOL_HEADER, ""))


def require_protocol(headers: Iterable[tuple[bytes, bytes]], peer: str) -> int:
    """Return the version in a request's headers, whose names are lower-case. Raises `PagemillError` (426)."""
    values = [value for name, value in headers if name == PROTOCOL_HEADER.encode()]
    try:
        return _check(peer, values[0].decode("latin-1") if values else "")
    except UnsupportedProtocol as error:
        raise PagemillError(str(error), status=426, code="unsupported_protocol") from None


def _check(peer: str, text: str) -> int:
    if not text:
        raise UnsupportedProtocol(
            f"{peer} names no version of the protocol; send the header `{PROTOCOL_HEADER}: {PROTOCOL_VERSION}`."
        )
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise UnsupportedProtocol(f"{peer} names the protocol version {text[:40]!r}, which is not a number.")
    version = int(text)
    if version < OLDEST_VERSION:
        raise UnsupportedProtocol(
            f"{peer} speaks version {version} of the protocol, and this release the versions {OLDEST_VERSION} to "
            f"{PROTOCOL_VERSION}. Upgrade it by one minor version at a time."
        )
    return version
