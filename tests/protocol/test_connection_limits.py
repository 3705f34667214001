"""The limits of all connections of a port: places per client and in all, and the memory of heads."""

from __future__ import annotations

import pytest

from pagemill_protocol.errors import PagemillError
from pagemill_servers.connection_limits import FREE_HEAD_BYTES, ConnectionLimits, Place, client_network, unmapped


class Port:
    """Opens connections and remembers which were closed to make room."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.closed: list[str] = []

    def open(self, host: str | None, name: str = "", *, busy: bool = False) -> Place:
        place = self.limits.open(host, lambda: self.closed.append(name))
        if busy:
            place.become_busy()
        return place


def code_of(error: pytest.ExceptionInfo[PagemillError]) -> tuple[int, str | None]:
    return error.value.status, error.value.code


def test_an_address_has_half_of_the_places_and_its_oldest_idle_connection_makes_room() -> None:
    port = Port(ConnectionLimits(8))
    for index in range(6):
        port.open("10.0.0.1", str(index))
    assert port.closed == ["0", "1"]
    assert port.limits.num_open == 4


def test_where_all_connections_of_an_address_are_busy_it_gets_no_more_and_others_do() -> None:
    port = Port(ConnectionLimits(8))
    for _ in range(4):
        port.open("10.0.0.1", busy=True)
    with pytest.raises(PagemillError) as error:
        port.open("10.0.0.1")
    assert code_of(error) == (503, "too_many_connections")
    port.open("10.0.0.2")
    assert port.limits.num_open == 5


def test_with_all_places_taken_the_oldest_idle_connection_without_a_key_makes_room_first() -> None:
    port = Port(ConnectionLimits(4))
    keyed = port.open("10.0.0.1", "keyed", busy=True)
    keyed.authenticated("tenant")
    keyed.become_idle()
    port.open("10.0.0.2", "second")
    port.open("10.0.0.3", "third")
    port.open("10.0.0.4", "fourth", busy=True)
    port.open("10.0.0.5", "fifth", busy=True)
    port.open("10.0.0.6", "sixth", busy=True)
    port.open("10.0.0.7", "seventh", busy=True)
    assert port.closed == ["second", "third", "keyed"]
    with pytest.raises(PagemillError) as error:
        port.open("10.0.0.8")
    assert code_of(error) == (503, "too_many_connections")


def test_connections_with_a_valid_key_count_for_their_tenant_and_not_for_their_address() -> None:
    port = Port(ConnectionLimits(8))
    for index in range(4):
        port.open("10.0.0.1", busy=True).authenticated(f"tenant {index % 2}")
    for _ in range(4):
        port.open("10.0.0.1", busy=True)
    assert port.closed == []


def test_a_tenant_has_half_of_the_places_however_many_addresses_it_has() -> None:
    port = Port(ConnectionLimits(8))
    for index in range(4):
        port.open(f"10.0.0.{index}", busy=True).authenticated("tenant")
    with pytest.raises(PagemillError) as error:
        port.open("10.0.0.9", busy=True).authenticated("tenant")
    assert code_of(error) == (503, "too_many_connections")
    port.open("10.0.0.9", busy=True).authenticated("other")


def test_a_released_place_is_free_again_and_leaves_no_client_behind() -> None:
    port = Port(ConnectionLimits(4))
    for index in range(100):
        place = port.open(f"10.0.{index}.1", busy=bool(index % 2))
        place.authenticated(f"tenant {index}")
        assert place.hold(20_000)
        place.release()
        place.release()
    assert (port.limits.num_open, port.limits.num_head_bytes, port.limits._clients) == (0, 0, {})
    assert port.closed == []


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") == "2001:db8::/64"
    assert client_network("2001:db8:0:1::1") != client_network("2001:db8::1")


@pytest.mark.parametrize(
    ("host", "shown"),
    [("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::1"), ("testclient",) * 2],
)
def test_clients_over_ipv4_have_their_ipv4_address(host: str, shown: str) -> None:
    assert unmapped(host) == shown


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([b"1.2.3.4"], "1.2.3.4"),
        ([b"9.9.9.9, 1.2.3.4, 10.0.0.7"], "1.2.3.4"),
        ([b"9.9.9.9", b"1.2.3.4:5678"], "1.2.3.4"),
        ([b"[2001:db8::1]:80"], "2001:db8::/64"),
        ([b"10.0.0.7"], "10.0.0.1"),
        ([b"::ffff:1.2.3.4, [::ffff:10.0.0.7]:80"], "1.2.3.4"),
        ([b"1.2.3.4, unknown"], "10.0.0.1"),
        ([], "10.0.0.1"),
    ],
)
def test_the_client_behind_a_proxy_is_the_last_address_that_is_no_trusted_proxys(
    values: list[bytes], client: str
) -> None:
    limits = ConnectionLimits(8, ["10.0.0.0/24"])
    assert limits.forwarded_client(values, "10.0.0.1") == client


def test_a_trusted_proxys_connections_count_for_the_client_of_each_request() -> None:
    port = Port(ConnectionLimits(8, ["10.0.0.0/24"]))
    places = [port.open("10.0.0.1", busy=True) for _ in range(6)]
    for place in places[:4]:
        place.forward_for("1.2.3.4")
    with pytest.raises(PagemillError):
        places[4].forward_for("1.2.3.4")
    places[4].forward_for("5.6.7.8")
    places[0].become_idle()
    places[5].forward_for("1.2.3.4")
    assert port.closed == []


def test_large_heads_share_one_budget_and_one_client_has_half_of_it() -> None:
    port = Port(ConnectionLimits(100, max_head_bytes=100_000))
    first = [port.open("10.0.0.1") for _ in range(6)]
    assert [place.hold(FREE_HEAD_BYTES + 10_000) for place in first] == [True] * 5 + [False]
    second = [port.open("10.0.0.2") for _ in range(6)]
    assert [place.hold(FREE_HEAD_BYTES + 10_000) for place in second] == [True] * 5 + [False]
    assert not port.open("10.0.0.3").hold(FREE_HEAD_BYTES + 1)
    first[0].hold(0)
    assert port.open("10.0.0.3").hold(FREE_HEAD_BYTES + 10_000)


def test_a_small_head_is_held_while_others_fill_the_budget() -> None:
    port = Port(ConnectionLimits(100, max_head_bytes=10_000))
    assert port.open(None).hold(FREE_HEAD_BYTES + 10_000)
    assert port.open("10.0.0.1").hold(FREE_HEAD_BYTES)


def test_a_network_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/99"):
        ConnectionLimits(8, ["10.0.0.0/99"])
