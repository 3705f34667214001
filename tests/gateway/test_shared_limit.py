"""The shares of tenants in an amount, and what the in-flight limit does with them."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_gateway.limits.in_flight_limit import InFlightLimit
from pagemill_gateway.routes.body import parsed_bytes
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.shares import TIMES_FREE, SharedLimit


def fill(limit: SharedLimit, tenant: str) -> int:
    while limit.take(tenant, 1):
        pass
    return limit.used_by(tenant)


def test_a_tenant_alone_may_use_all_but_the_last_tenth() -> None:
    assert fill(SharedLimit(1000), "a") == 900


def test_without_tenants_only_the_limit_in_all_applies() -> None:
    assert fill(SharedLimit(1000), "") == 1000


def test_tenants_that_take_turns_get_equal_shares_and_leave_room() -> None:
    limit = SharedLimit(1900)
    while limit.take("a", 1) | limit.take("b", 1):
        pass
    assert abs(limit.used_by("a") - limit.used_by("b")) <= 1
    assert limit.used_by("a") == pytest.approx(900, abs=2)


def test_however_many_tenants_take_all_they_can_a_further_one_finds_room() -> None:
    limit = SharedLimit(10_000)
    for number in range(3):
        assert fill(limit, f"greedy {number}") > 0
    assert limit.take("quiet", 1)


def test_a_tenant_without_anything_may_take_one_piece_of_any_size() -> None:
    limit = SharedLimit(100)
    assert limit.take("a", 100)
    assert not limit.take("b", 1)
    limit.release("a", 100)
    assert limit.take("b", 1)


Steps = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=60)


@settings(max_examples=num_examples(200), deadline=None)
@given(steps=Steps)
def test_no_order_of_steps_exceeds_the_limit_or_a_share(steps: list[tuple[str, int, bool]]) -> None:
    limit = SharedLimit(100)
    held: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for tenant, amount, takes in steps:
        if not takes and held[tenant]:
            limit.release(tenant, held[tenant].pop())
        elif takes and limit.take(tenant, amount):
            free = 100 - limit.used
            assert not held[tenant] or limit.used_by(tenant) <= TIMES_FREE * free
            held[tenant].append(amount)
        assert limit.used == sum(map(sum, held.values())) <= 100
        assert all(limit.used_by(each) == sum(amounts) for each, amounts in held.items())


def test_a_refusal_of_the_tenants_share_is_429_and_one_of_the_limit_503() -> None:
    gate = InFlightLimit(10, 1000)
    with gate.enter("a") as slot:
        slot.hold(900)
        with pytest.raises(PagemillError) as own:
            slot.hold(50)
        assert (own.value.status, own.value.code, own.value.retry_after_s) == (429, "tenant_share_exceeded", 1)
        assert "900 bytes" in own.value.message
        with gate.enter("b") as other, pytest.raises(PagemillError) as all_:
            other.hold(101)
        assert all_.value.status == 503
        assert "max_in_flight_body_bytes" in all_.value.message


class Ended(list[str]):
    def by(self, name: str) -> Callable[[], None]:
        return lambda: self.append(name)


def test_unread_answers_beyond_a_share_end_the_one_that_has_waited_longest() -> None:
    gate, ended = InFlightLimit(10, 1000), Ended()
    with gate.enter("a") as first, gate.enter("a") as second, gate.enter("a") as third, gate.enter("b") as other:
        with other.unread(50, ended.by("other")), first.unread(400, ended.by("first")):
            with second.unread(400, ended.by("second")):
                assert not ended
                with third.unread(400, ended.by("third")):
                    assert ended == ["first"]
                    assert gate.num_bytes == 850
            assert gate.num_bytes == 50
        assert gate.num_bytes == 0


def test_an_unread_answer_without_room_ends_itself_and_no_answer_of_others() -> None:
    gate, ended = InFlightLimit(10, 1000), Ended()
    with gate.enter("a") as full, gate.enter("b") as slot, gate.enter("c") as other:
        full.hold(880)
        with other.unread(20, ended.by("other")), slot.unread(200, ended.by("own")):
            assert ended == ["own"]
        assert gate.num_bytes == 880


def test_a_request_that_leaves_gives_back_all_its_bytes() -> None:
    gate = InFlightLimit(10, 1000)
    with gate.enter("a") as slot:
        slot.hold(100)
        slot.resize(30)
        slot.hold(5)
        assert gate.num_bytes == 35
    assert gate.num_bytes == gate.num_in_flight == 0


@pytest.mark.parametrize(
    "piece",
    [b"[]", b"{}", b'"ab"', b"1000", b"1.5", b'{"role":"user","content":"hi"}', '"é"'.encode(), '"😀"'.encode()],
)
def test_the_memory_of_a_parsed_body_is_counted(piece: bytes, traced: Callable[[Callable[[], object]], int]) -> None:
    raw = b"[" + b",".join([piece] * 20_000) + b"]"
    taken = traced(lambda: orjson.loads(raw))
    assert taken <= parsed_bytes(raw) * 2.5
    assert parsed_bytes(raw) < len(raw) * 70


@pytest.mark.parametrize(
    "text", ["plain " * 20_000, "é" * 50_000, "x" * 100_000 + "😀", "x" * 100_000 + "\\ud83d\\ude00"]
)
def test_the_memory_of_a_parsed_text_is_counted(text: str, traced: Callable[[Callable[[], object]], int]) -> None:
    raw = f'["{text}"]'.encode()
    assert traced(lambda: orjson.loads(raw)) <= parsed_bytes(raw) + 1000


@pytest.fixture
def traced() -> Callable[[Callable[[], object]], int]:
    """Return a function that measures the memory of what its argument makes."""
    import tracemalloc

    def measure(make: Callable[[], object]) -> int:
        tracemalloc.start()
        made = make()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del made
        return num_bytes

    return measure
