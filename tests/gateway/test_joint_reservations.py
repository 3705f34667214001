"""Reservations in the accounts of a key and of a model: all or none, and no account exceeds its limits."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from limit_histories import limits

from examples import num_examples
from pagemill_gateway.limits.joint import JointReservation, RefusedReservation
from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.store import ReservationAnswer, ReservationRequest, token_limits
from pagemill_servers.keys.caller import Charge, Limits

ACCOUNTS = ("key", "model")
steps = st.lists(st.tuples(st.sampled_from(["wait", "reserve", "extend", "settle"]), st.integers(1, 200)), max_size=30)


class World:
    def __init__(self, of_key: Limits, of_model: Limits) -> None:
        self.now_ms = 5_000_000
        self.store = MemoryStore(lambda: self.now_ms, lambda: 1_795_391_000.0)
        self.charges = [Charge("key", of_key), Charge("model", of_model, "sales")]
        self.leases = itertools.count()

    def levels(self) -> list[ReservationAnswer]:
        """Return what is used, as answers to a request that no account has room for."""
        none = Limits(requests_per_minute=10**6, tokens_per_minute=10**6, concurrency=0)
        return [self.store.decide(ReservationRequest(name, "probe", 0, none)) for name in ACCOUNTS]

    def joint(self, tokens: int) -> JointReservation:
        tokens = min([tokens, *(each for charge in self.charges for each in token_limits(charge.limits))])
        asks = [ReservationRequest(each.account, str(next(self.leases)), tokens, each.limits) for each in self.charges]
        return JointReservation(self.store, self.charges, asks)


@settings(max_examples=num_examples(200), deadline=None)
@given(of_key=limits, of_model=limits, history=steps)
def test_all_accounts_reserve_or_none(of_key: Limits, of_model: Limits, history: list[tuple[str, int]]) -> None:
    asyncio.run(_all_or_none(World(of_key, of_model), history))


async def _all_or_none(world: World, history: list[tuple[str, int]]) -> None:
    held: dict[JointReservation, int] = {}
    for kind, amount in history:
        before = world.levels()
        if kind == "wait":
            world.now_ms += amount * 100
        elif kind == "reserve":
            joint = world.joint(amount)
            answer = await joint.reserve()
            if isinstance(answer, RefusedReservation):
                assert answer.answer.refused is not None
                assert world.levels() == before, "a refused request leaves no trace"
            else:
                held[joint] = answer.granted
        elif held and kind == "extend":
            joint = next(reversed(held))
            granted = await joint.extend(0, amount)
            assert 0 <= granted <= amount
            held[joint] += granted
        elif held:
            joint, granted = held.popitem()
            joint.settle(min(granted, amount))
        for charge, level in zip(world.charges, world.levels(), strict=True):
            bound = charge.limits.tokens_per_minute
            if bound is not None and level.tokens is not None and kind != "settle":
                assert 10**6 - level.tokens.remaining <= bound
    for joint in held:
        joint.settle(0)
    assert world.store.num_held == 0


def test_tokens_that_one_account_lacks_are_kept_for_the_next_growth() -> None:
    asyncio.run(_kept())


async def _kept() -> None:
    world = World(Limits(tokens_per_minute=100), Limits(tokens_per_minute=50))
    one, other = world.joint(30), world.joint(10)
    for each in (one, other):
        assert not isinstance(await each.reserve(), RefusedReservation)
    assert [await one.extend(0, 40) for _ in range(5)] == [10, 0, 0, 0, 0]
    key, _ = world.levels()
    assert key.tokens is not None
    assert 10**6 - key.tokens.remaining == 90, "it has the 40 tokens of one growth to spare, not of four"
    other.settle(0)
    assert await one.extend(0, 40) == 10
    one.settle(50)
    assert [10**6 - level.tokens.remaining for level in world.levels() if level.tokens] == [50, 50]
