"""Servers of pods listen on `::`: for IPv4 and IPv6 where there is IPv6, and for IPv4 alone elsewhere."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from pagemill_servers.process.listening import ListenError, bind, bound_address


def reaches(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_every_address_of_both_families_is_listened_on() -> None:
    with bind("::", 0, "port") as listener:
        port = bound_address(listener)[1]
        assert reaches("127.0.0.1", port)
        assert reaches("::1", port) == has_ipv6()


@pytest.mark.parametrize("missing", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_every_address_of_ipv4_is_listened_on(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    class OnlyIPv4(socket.socket):
        def __init__(self, family: int = -1, *arguments: Any, **options: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(missing, "no IPv6")
            super().__init__(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", OnlyIPv4)
    with bind("::", 0, "port") as listener:
        assert bound_address(listener)[0] == "0.0.0.0"
        assert reaches("127.0.0.1", bound_address(listener)[1])
    with pytest.raises(ListenError) as refused:
        bind("::1", 0, "port")
    assert refused.value.field == ("host" if missing == errno.EADDRNOTAVAIL else "port")


def test_a_port_in_use_is_not_taken_for_missing_ipv6() -> None:
    with bind("::", 0, "port") as listener:
        with pytest.raises(ListenError) as refused:
            bind("::", bound_address(listener)[1], "port")
        assert refused.value.reason == "PortInUse"
