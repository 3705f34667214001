"""Routing policies on examples of the systems that they come from; those of the cost policy are worked by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pagemill_protocol.report.state import EngineLoad, StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.policies.cost import CostPolicy
from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision
from pagemill_routing.policies.power_of_two import PowerOfTwo, drawn_pair
from pagemill_routing.policies.prefix_hash import PrefixHash, ring, ring_hash, within_load_bound
from pagemill_routing.policies.registry import RoutingPolicies
from pagemill_routing.policies.report import PodReport
from pagemill_routing.policies.round_robin import RoundRobin
from pagemill_routing.policies.step_time_snapshot import take_snapshot
from pagemill_routing.policies.weighted322 import Weighted322, queue_scores

PLAIN = StepTimeModel.from_params(StepTimeParams(knots_tokens=[1, 101], knot_ms=[10.0, 110.0]))
"""9 ms for each step and 1 ms for each token."""


def pod(name: str = "a", *, in_flight: int = 0, last_chosen: int = 0, cached: int = 0, **fields: Any) -> Candidate:
    own = {
        key: fields.pop(key)
        for key in ("num_unreported", "num_unreported_tokens", "session", "adapter_ms")
        if key in fields
    }
    model, max_num_seqs = fields.pop("model", PLAIN), fields.pop("max_num_seqs", 0)
    load = EngineLoad(**{"num_kv_bytes_total": 100, **fields})
    snapshot = take_snapshot(model, 100, load.num_requests_running, 0) if model is not None else None
    report = PodReport(load, 16, 100, max_num_seqs, snapshot)
    return Candidate(name, in_flight, 0, last_chosen, report, True, cached, **own)


def terms(decision: RoutingDecision, index: int = 0) -> dict[str, float]:
    return dict(zip(decision.columns, decision.rows[index], strict=True))


def test_an_idle_pod_costs_the_steps_of_the_prompt_without_its_cached_tokens() -> None:
    request = RequestView(250)
    assert terms(CostPolicy().choose(request, [pod()]))["ttft_ms"] == pytest.approx(109 + 109 + 59)
    assert terms(CostPolicy().choose(request, [pod(cached=192)]))["ttft_ms"] == pytest.approx(9 + 58)


def test_waiting_tokens_are_computed_first_whether_reported_or_not() -> None:
    request = RequestView(50)
    reported = terms(CostPolicy().choose(request, [pod(num_requests_waiting=1, num_tokens_waiting=150)]))
    unreported = terms(CostPolicy().choose(request, [pod(num_unreported=1, num_unreported_tokens=150)]))
    assert reported == unreported
    assert reported["prefill_ms"] == pytest.approx(2 * 109)
    assert reported["step_ms"] == pytest.approx(109)


def test_running_requests_use_a_share_of_the_budget_and_are_delayed() -> None:
    row = terms(
        CostPolicy().choose(RequestView(90, num_output_tokens=0.0), [pod(num_requests_running=10, in_flight=10)])
    )
    assert row["step_ms"] == pytest.approx(19)
    assert row["prefill_ms"] == pytest.approx(109)
    assert row["harm_ms"] == pytest.approx(0.1 * 10 * (109 - 20) / 90 * 90)


def test_without_slots_or_blocks_a_request_waits_for_others_to_end() -> None:
    request = RequestView(32, num_output_tokens=10.0)
    full = pod(num_requests_running=4, max_num_seqs=4)
    assert terms(CostPolicy().choose(request, [full]))["wait_ms"] == pytest.approx(1 * 10 * 14 / 4)
    packed = pod(num_requests_running=4, num_kv_bytes_total=101, num_kv_bytes_active=100)
    assert terms(CostPolicy().choose(request, [packed]))["wait_ms"] == pytest.approx(2 * 10 * 14 / 100)


def test_a_popular_prefix_spreads_when_waiting_costs_more_than_computing_it() -> None:
    cold, request = pod("cold"), RequestView(200)
    assert (
        CostPolicy().choose(request, [cold, pod("hot", cached=192, num_unreported_tokens=80)]).chosen.endpoint_id
        == "hot"
    )
    busy = pod("hot", cached=192, num_unreported_tokens=400)
    assert CostPolicy().choose(request, [cold, busy]).chosen.endpoint_id == "cold"


def test_a_faster_pod_is_chosen_despite_a_longer_queue() -> None:
    slow = StepTimeModel.from_params(StepTimeParams(knots_tokens=[1, 101], knot_ms=[100.0, 1100.0]))
    candidates = [pod("slow", model=slow), pod("fast", num_requests_waiting=2, num_tokens_waiting=300)]
    assert CostPolicy().choose(RequestView(100), candidates).chosen.endpoint_id == "fast"


def test_a_resident_adapter_is_worth_a_queue_up_to_the_time_of_a_load() -> None:
    """50 tokens take 59 ms; 100 tokens before them add 218 ms (a running step of 109 ms, and the same again)."""
    request, queue = RequestView(50, is_for_adapter=True), {"num_requests_waiting": 1, "num_tokens_waiting": 100}
    for load_ms, chosen in ((200.0, "loads"), (250.0, "has it")):
        decision = CostPolicy().choose(request, [pod("has it", **queue), pod("loads", adapter_ms=load_ms)])
        assert decision.chosen.endpoint_id == chosen
    assert terms(decision, 1)["adapter_ms"] == 250
    assert terms(decision, 1)["ttft_ms"] == pytest.approx(59 + 250)


def test_near_ties_are_split_by_requests_and_turn() -> None:
    candidates = [pod("a", in_flight=2), pod("b", in_flight=1, last_chosen=7), pod("c", in_flight=1, last_chosen=3)]
    decision = CostPolicy().choose(RequestView(100), candidates)
    assert (decision.chosen.endpoint_id, decision.why) == ("c", "3 costs nearly equal: fewest requests")


@given(lost_ms=st.integers(0, 100))
def test_a_session_stays_until_it_loses_more_than_the_limit(lost_ms: int) -> None:
    here, elsewhere = pod("here", session=True), pod("elsewhere", cached=lost_ms // 16 * 16)
    decision = CostPolicy(session_ms=50.0).choose(RequestView(100), [elsewhere, here])
    lost = terms(decision, 1)["ttft_ms"] - terms(decision, 0)["ttft_ms"]
    assert decision.chosen.endpoint_id == ("here" if lost <= 50 else "elsewhere")


@given(num_ahead=st.integers(0, 100_000), num_more=st.integers(0, 300), in_flight=st.integers(0, 3))
def test_a_sessions_limit_does_not_depend_on_the_length_of_the_queues(
    num_ahead: int, num_more: int, in_flight: int
) -> None:
    here = pod("here", session=True, num_requests_waiting=1, num_tokens_waiting=num_ahead + num_more)
    elsewhere = pod("elsewhere", num_requests_waiting=1, num_tokens_waiting=num_ahead, in_flight=in_flight)
    decision = CostPolicy(session_ms=50.0).choose(RequestView(100), [elsewhere, here])
    costs = [terms(decision, index) for index in range(2)]
    lost_ms = costs[1]["cost_ms"] - (costs[0]["cost_ms"] - costs[0]["affinity_ms"])
    assert decision.chosen.endpoint_id == ("here" if lost_ms <= 50 else "elsewhere")


def test_a_pod_without_a_step_time_model_gets_that_of_the_others() -> None:
    silent = pod("silent", model=None, num_requests_waiting=1, num_tokens_waiting=500)
    decision = CostPolicy().choose(RequestView(100), [silent, pod("b", num_tokens_waiting=100, in_flight=9)])
    assert decision.chosen.endpoint_id == "b"
    nothing_known = [replace(pod("a", in_flight=3), report=None), pod("b", in_flight=2)]
    decision = CostPolicy().choose(RequestView(100), nothing_known)
    assert (decision.chosen.endpoint_id, decision.rows) == ("b", ())


pods = st.builds(
    pod,
    st.sampled_from("abcdefgh"),
    in_flight=st.integers(0, 50),
    cached=st.integers(0, 6).map(lambda number: number * 64),
    max_num_seqs=st.integers(0, 8),
    num_requests_running=st.integers(0, 200),
    num_requests_waiting=st.integers(0, 50),
    num_tokens_waiting=st.integers(0, 10**6),
    num_kv_bytes_total=st.integers(100, 200),
    num_kv_bytes_active=st.integers(0, 100),
    num_unreported_tokens=st.integers(0, 10**5),
)


@given(
    candidates=st.lists(pods, min_size=1, max_size=8, unique_by=lambda each: each.endpoint_id),
    prompt=st.integers(1, 10**5),
)
def test_the_chosen_cost_is_minimal_except_for_near_ties_and_never_negative(
    candidates: list[Candidate], prompt: int
) -> None:
    decision = CostPolicy().choose(RequestView(prompt), candidates)
    costs = [row[-1] for row in decision.rows]
    assert all(value >= 0 for row in decision.rows for value in row)
    chosen = costs[candidates.index(decision.chosen)]
    assert chosen <= min(costs) + max(0.5, min(costs) * 0.02)


def test_llm_d_scores_queues_between_the_shortest_and_the_longest() -> None:
    """The example of llm-d's queue scorer: 10, 5 and 0 waiting requests."""
    assert queue_scores([10, 5, 0]) == [0.0, 0.5, 1.0]
    assert queue_scores([5, 5]) == [1.0, 1.0]
    assert queue_scores([0, 1]) == [1.0, 0.0], "one waiting request decides the whole score"


def test_weighted322_adds_queue_kv_and_prefix_with_their_weights() -> None:
    candidates = [
        pod("a", num_requests_waiting=0, num_kv_bytes_active=80),
        pod("b", num_requests_waiting=2, num_kv_bytes_active=20, cached=64),
        pod("c", num_requests_waiting=4, num_kv_bytes_active=50, cached=128),
    ]
    decision = Weighted322().choose(RequestView(128), candidates)
    assert [row[-1] for row in decision.rows] == pytest.approx([2 + 0.4, 1 + 1.6 + 1.5, 0 + 1 + 3])
    assert decision.chosen.endpoint_id == "b"
    tied = [pod(name) for name in "abcd"]
    assert Weighted322().choose(RequestView(128, draw=0.6), tied).chosen.endpoint_id == "c"


@pytest.mark.parametrize(
    ("load", "total", "count", "is_within"),
    [(0, 0, 3, True), (3, 9, 3, True), (4, 9, 3, False), (0, 1, 2, True), (1, 1, 2, False), (9, 0, 3, True)],
)
def test_kubeai_allows_no_endpoint_a_quarter_more_than_the_mean(
    load: int, total: int, count: int, is_within: bool
) -> None:
    """KubeAI's rule with its default of 125 %: load + 1 <= (total + 1) / endpoints * 1.25, or an idle endpoint."""
    assert within_load_bound(load, total, count) is is_within


def test_prefix_hash_keeps_equal_prefixes_together_and_continues_when_full() -> None:
    candidates = [pod(name) for name in ("a", "b", "c")]
    request = RequestView(prompt_key=b"You are a helpful assistant")
    first = PrefixHash().choose(request, candidates).chosen
    assert all(PrefixHash().choose(request, candidates).chosen == first for _ in range(5))
    loaded = [replace(each, in_flight=4 if each is first else 1) for each in candidates]
    second = PrefixHash().choose(request, loaded).chosen
    assert second.endpoint_id != first.endpoint_id
    points, owners = ring(("a", "b", "c"))
    after = [owner for point, owner in zip(points, owners, strict=True) if point >= ring_hash(request.prompt_key)]
    walk = list(dict.fromkeys([*after, *owners]))
    assert [first.endpoint_id, second.endpoint_id] == walk[:2]


def test_prefix_hash_moves_few_keys_when_an_endpoint_is_added() -> None:
    few, more = [pod(name) for name in "abcd"], [pod(name) for name in "abcde"]
    policy = PrefixHash()
    moved = Counter[str]()
    for number in range(400):
        request = RequestView(prompt_key=str(number).encode())
        before, after = (policy.choose(request, each).chosen.endpoint_id for each in (few, more))
        if before != after:
            moved[after] += 1
    assert set(moved) == {"e"}
    assert 40 <= moved["e"] <= 130


@pytest.mark.parametrize("count", [2, 3, 7])
def test_power_of_two_draws_every_pair_equally_often(count: int) -> None:
    total = count * (count - 1)
    pairs = Counter(drawn_pair((number + 0.5) / total, count) for number in range(total))
    assert set(pairs.values()) == {1}
    assert len(pairs) == total
    assert all(first != second for first, second in pairs)


def test_power_of_two_never_chooses_the_busier_of_its_pair() -> None:
    candidates = [pod(name, in_flight=number) for number, name in enumerate("abcd")]
    chosen = Counter(
        PowerOfTwo().choose(RequestView(draw=(number + 0.5) / 120), candidates).chosen.endpoint_id
        for number in range(120)
    )
    assert chosen == {"a": 60, "b": 40, "c": 20}
    assert PowerOfTwo().choose(RequestView(draw=0.9), candidates[:1]).chosen.endpoint_id == "a"


def test_round_robin_takes_turns_whatever_the_load() -> None:
    last_chosen = dict.fromkeys("abc", 0)
    order = []
    for number in range(1, 8):
        candidates = [pod(name, in_flight=ord(name), last_chosen=turn) for name, turn in last_chosen.items()]
        chosen = RoundRobin().choose(RequestView(), candidates).chosen.endpoint_id
        last_chosen[chosen] = number
        order.append(chosen)
    assert order == list("abcabca")


def test_a_deployment_can_name_its_policy_and_the_gateways_default_applies_otherwise() -> None:
    policies = RoutingPolicies("PowerOfTwo", 50.0)
    names = ["Auto", "LeastRequest", "RoundRobin", "PrefixHash", "Weighted322", "OfTheFuture"]
    chosen = [policies.named(name).name for name in names]
    assert chosen == [
        "PowerOfTwo",
        "LeastRequest",
        "RoundRobin",
        "PrefixHash",
        "Weighted322",
        "PowerOfTwo",
    ]
