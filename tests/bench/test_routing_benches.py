"""The evaluation of runs of routing through several gateways and on real engines."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_routing import against_one, labelled, survivors
from real_routing import POLICIES, conversations, middle
from routers.chats import Reported


def times(ms: float) -> dict[str, Any]:
    return {"ttft_mean_ms": ms, "ttft_p50_ms": ms, "ttft_p99_ms": 2 * ms}


def test_several_gateways_are_compared_with_one_of_the_same_kind() -> None:
    assert (labelled("pagemill Cost", 1), labelled("pagemill Cost", 3)) == ("pagemill Cost", "pagemill Cost x3")
    found = {
        "chat": {"pagemill Cost": times(100.0), "pagemill Cost x3": times(104.0), "smg x3": times(50.0)},
        "one gateway killed": {"pagemill Cost x3": times(90.0)},
    }
    assert against_one(found) == {"chat": {"pagemill Cost x3": {"mean": 1.04, "p50": 1.04, "p99": 1.04}}}


def test_after_a_killed_gateway_only_failures_at_the_others_count() -> None:
    reported = Reported([10.0, 20.0], [1.0], 100, 40, ["cut", "refused", "cut"], ["a", "a", "b"])
    values = survivors(reported, "a")
    assert (values["num_failed"], values["num_cut_with_the_gateway"], values["num_requests"]) == (1, 2, 2)
    assert survivors(Reported([10.0], faults=["cut"], faulty_urls=["a"]), "a")["num_failed"] == 0


def test_conversations_share_a_system_prompt_and_have_all_their_turns() -> None:
    [first, second] = conversations(2, 16, 8, seed=1)
    assert first.prefix == second.prefix
    assert first.turns[0].token_ids != second.turns[0].token_ids
    assert [len(each.turns) for each in (first, second)] == [16, 16]
    assert {turn.num_output_tokens for turn in first.turns} == {8}
    assert conversations(2, 16, 8, seed=1) == [first, second]


def test_the_median_round_without_failures_is_used() -> None:
    rounds = [{"ttft_mean_ms": ms, "num_failed": 0} for ms in (30.0, 10.0, 20.0)]
    assert middle([*rounds, {"ttft_mean_ms": 1.0, "num_failed": 2}])["ttft_mean_ms"] == 20.0
    assert middle([{"ttft_mean_ms": 1.0, "num_failed": 2}])["num_failed"] == 2


@pytest.mark.parametrize("name", ["Auto", "LeastRequest", "RoundRobin", "PowerOfTwo", "PrefixHash", "Weighted322"])
def test_every_policy_of_the_spec_is_measured_once(name: str) -> None:
    assert POLICIES.count(name) == 1
    assert len(POLICIES) == 6
