"""Allowances of engine requests: the first part, when more is reserved, and how unused tokens are given to others."""

from __future__ import annotations

from typing import Any, NamedTuple

from pagemill_gateway.limits.allowance import LEAST_GROWTH_TOKENS, MARGIN_TOKENS, Allowance, Reserved, TokenNeed
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

PROMPT = 10


class Extended(NamedTuple):
    used: int
    tokens: int


class FullStore:
    """It has `left` tokens and records the calls."""

    def __init__(self, left: int = 10**6) -> None:
        self.left = left
        self.asked: list[Extended] = []

    async def extend(self, used: int, tokens: int) -> int:
        self.asked.append(Extended(used, tokens))
        granted = min(self.left, tokens)
        self.left -= granted
        return granted


def reserve(store: FullStore, granted: int, *needs: TokenNeed) -> tuple[Reserved, list[Allowance]]:
    reserved = Reserved(store.extend, PROMPT * len(needs), granted, needs)
    return reserved, reserved.allowances


def need(first: int, most: int, *, stream: bool = True, **sampling: Any) -> TokenNeed:
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[1] * PROMPT,
        sampling=SamplingParams(**sampling),
        stream=stream,
    )
    return TokenNeed(request, first, most)


def tokens(count: int, choice: int = 0, finish_reason: Any = None) -> FrameMeta:
    return FrameMeta(choice=choice, token_ids=[1] * count, finish_reason=finish_reason)


def test_the_first_allowance_is_the_expected_length_or_less_if_a_limit_leaves_less() -> None:
    _, (one, two) = reserve(FullStore(), 2 * PROMPT + 300, need(100, 500, n=2), need(100, 500))
    assert (one.begin(), two.begin()) == (100, 100)
    _, (one, two) = reserve(FullStore(), 2 * PROMPT + 31, need(100, 500, n=2), need(100, 500))
    assert (one.begin(), two.begin()) == (10, 10)
    _, (only,) = reserve(FullStore(), PROMPT + 1, need(100, 500))
    assert only.begin() == 1


async def test_more_is_reserved_before_a_sequence_reaches_its_allowance() -> None:
    store = FullStore()
    _, (allowance,) = reserve(store, PROMPT + 2 * 300, need(300, 2000, n=2))
    allowance.count(tokens(300 - MARGIN_TOKENS))
    assert not allowance.low
    allowance.count(tokens(1))
    assert allowance.low
    assert await allowance.grow()
    assert allowance.tokens == 300 + LEAST_GROWTH_TOKENS
    assert [(more.used, more.tokens) for more in store.asked] == [
        (PROMPT + 300 - MARGIN_TOKENS + 1, 2 * LEAST_GROWTH_TOKENS)
    ]
    assert not allowance.low


async def test_a_long_answer_reserves_larger_parts_up_to_its_maximum_length() -> None:
    store = FullStore()
    _, (allowance,) = reserve(store, PROMPT + 1000, need(1000, 1600))
    assert await allowance.grow()
    assert allowance.tokens == 1500
    assert await allowance.grow()
    assert allowance.tokens == 1600
    allowance.count(tokens(1599))
    assert not allowance.low, "an allowance at the maximum must not ask for more"


async def test_the_remaining_tokens_are_shared_equally_among_sequences() -> None:
    store = FullStore(left=7)
    _, (allowance,) = reserve(store, PROMPT + 3 * 20, need(20, 2000, n=3))
    assert await allowance.grow()
    assert allowance.tokens == 22
    assert not await allowance.grow(), "one token is not enough for three sequences"
    store.left = 2
    assert await allowance.grow(), "the remaining token must still be reserved"
    assert allowance.tokens == 23


async def test_unused_tokens_of_a_finished_sequence_are_used_by_others_first() -> None:
    store = FullStore()
    reserved, (one, two) = reserve(store, 2 * PROMPT + 3 * 300, need(300, 2000, n=2), need(300, 2000))
    one.count(tokens(100, 0, "stop"))
    two.count(tokens(250))
    assert await two.grow()
    assert two.tokens == 300 + LEAST_GROWTH_TOKENS
    (more,) = store.asked
    assert more.tokens == LEAST_GROWTH_TOKENS - 200, "of 300 tokens, 100 were used"
    assert more.used == 2 * PROMPT + 100 + 250 == reserved.used


async def test_an_answer_that_restarts_takes_back_the_tokens_it_released() -> None:
    store = FullStore(left=0)
    reserved, (allowance,) = reserve(store, PROMPT + 2 * 300, need(300, 2000, n=2, stream=False))
    allowance.count(tokens(100, 0, "stop"))
    allowance.begin_anew()
    assert reserved.used == PROMPT
    assert not await allowance.grow(), "the first part needs all tokens again"
    allowance.count(tokens(100, 0, "stop"))
    assert await allowance.grow()
    assert allowance.tokens == 500


async def test_tokens_that_others_used_before_a_restart_are_reserved_again() -> None:
    store = FullStore(left=0)
    _, (one, two) = reserve(store, 2 * PROMPT + 2 * 300, need(300, 400, stream=False), need(300, 2000))
    one.count(tokens(100, 0, "stop"))
    assert await two.grow()
    assert two.tokens == 500
    one.begin_anew()
    store.left = 10**6
    assert await two.grow()
    (_, more) = store.asked
    assert more.tokens == LEAST_GROWTH_TOKENS + 200


def test_an_answer_that_reports_only_at_its_end_counts_with_its_full_allowance() -> None:
    reserved, (chosen,) = reserve(FullStore(), PROMPT + 4 * 50, need(50, 50, n=1, best_of=4, stream=False))
    assert reserved.num_possible == 0, "no engine has the request yet"
    chosen.begin()
    assert reserved.num_possible == 4 * 50
    assert not chosen.low


def test_tokens_that_are_not_reported_yet_count_as_possible() -> None:
    reserved, (allowance,) = reserve(FullStore(), PROMPT + 3 * 60, need(60, 60, n=3, stream=False))
    allowance.begin()
    allowance.count(tokens(16, 0))
    allowance.count(tokens(48, 1))
    allowance.count(tokens(20, 2, "stop"))
    assert reserved.num_possible == (16 + 15) + 60 + 20
    reserved, (streamed,) = reserve(FullStore(), PROMPT + 60, need(60, 60))
    streamed.begin()
    streamed.count(tokens(16))
    assert reserved.num_possible == 16


def test_a_limit_ended_an_answer_that_stops_at_an_allowance_below_its_own_length() -> None:
    for first, most, ended in ((50, 100, True), (50, 50, False)):
        reserved, (allowance,) = reserve(FullStore(), PROMPT + first, need(first, most))
        allowance.count(tokens(50, 0, "length"))
        assert reserved.ended_answer == ended
    reserved, (allowance,) = reserve(FullStore(), PROMPT + 50, need(50, 100))
    allowance.count(tokens(50, 0, "stop"))
    assert not reserved.ended_answer
