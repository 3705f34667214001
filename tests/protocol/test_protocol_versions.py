"""Compatibility of peers: those of this release and the previous one work together, older ones are refused."""

from __future__ import annotations

import pytest

from pagemill_protocol import versions
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.versions import (
    PROTOCOL_VERSION,
    UnsupportedProtocol,
    check_peer,
    protocol_headers,
    require_protocol,
)


@pytest.fixture
def third_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the protocol version to that of a release two versions later."""
    monkeypatch.setattr(versions, "PROTOCOL_VERSION", 3)
    monkeypatch.setattr(versions, "OLDEST_VERSION", 2)


def as_request(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((name.encode(), value.encode()) for name, value in headers.items())]


def test_a_peer_of_this_release_is_accepted() -> None:
    assert check_peer("The engine", protocol_headers()) == PROTOCOL_VERSION
    assert require_protocol(as_request(protocol_headers()), "The gateway") == PROTOCOL_VERSION


def test_a_peer_without_a_version_is_refused_with_the_header_to_send() -> None:
    message = r"names no version of the protocol; send the header `x-pagemill-protocol: 1`"
    with pytest.raises(UnsupportedProtocol, match=f"The engine {message}"):
        check_peer("The engine", {})
    with pytest.raises(PagemillError, match=f"The gateway {message}") as refused:
        require_protocol(as_request({}), "The gateway")
    assert (refused.value.status, refused.value.code) == (426, "unsupported_protocol")


@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize("version", ["2", "3", "4", "12"])
def test_the_previous_release_and_all_later_ones_are_accepted(version: str) -> None:
    assert check_peer("The engine", {"x-pagemill-protocol": version}) == int(version)


@pytest.mark.usefixtures("third_version")
@pytest.mark.parametrize("headers", [{"x-pagemill-protocol": "1"}])
def test_an_older_peer_is_refused_with_both_versions_and_the_remedy(headers: dict[str, str]) -> None:
    message = "The engine speaks version 1 of the protocol, and this release the versions 2 to 3. Upgrade it by one"
    with pytest.raises(UnsupportedProtocol, match=message):
        check_peer("The engine", headers)
    with pytest.raises(PagemillError, match="The gateway speaks version 1") as refused:
        require_protocol(as_request(headers), "The gateway")
    assert (refused.value.status, refused.value.code) == (426, "unsupported_protocol")


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "1" * 7, "\u0661"])
def test_a_version_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedProtocol, match="which is not a number"):
        check_peer("The engine", {"x-pagemill-protocol": text})
