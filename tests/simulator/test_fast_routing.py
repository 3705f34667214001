"""Choices over arrays are those of the gateway's own policy and room check, pod by pod."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_gateway.admission.reservations import Need, Reservations
from pagemill_gateway.brain.endpoints.record import EndpointRecord, has_capacity
from pagemill_gateway.brain.endpoints.reports import EndpointReports
from pagemill_gateway.routing.cost import CostPolicy
from pagemill_gateway.routing.policy import Candidate, RequestView
from pagemill_gateway.routing.report import PodReport
from pagemill_gateway.routing.step_time_snapshot import take_snapshot
from pagemill_protocol.catalog import Endpoint
from pagemill_protocol.state import EngineLoad, StateFrame, StepTimeParams
from pagemill_simulator.fleet.fast_pod import PodLoad
from pagemill_simulator.fleet.fast_routing import PodTable
from pagemill_simulator.fleet.fast_steps import StepTimes

LIMITS = SchedulerLimits(num_blocks=400, block_size=16, max_model_len=8192, vocab_size=100, max_num_seqs=12)
STEPS = StepTimes(
    StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-4, chunk_context_ms=1e-6),
    LIMITS.max_num_batched_tokens,
)


class Sent(NamedTuple):
    """A request of ours on a pod."""

    num_prompt_tokens: int
    num_output_tokens: int
    is_reported: bool


class Drawn(NamedTuple):
    load: PodLoad
    sent: list[Sent]
    num_cached_tokens: int


@st.composite
def pods(draw: st.DrawFn) -> Drawn:
    active = draw(st.integers(0, LIMITS.num_blocks))
    num_running = draw(st.integers(0, 14)) if active else 0
    num_waiting = draw(st.integers(0, 3))
    load = PodLoad(
        num_running,
        num_waiting,
        draw(st.integers(0, 16 * active)) if num_running else 0,
        draw(st.integers(1, 3000)) if num_waiting else 0,
        LIMITS.num_blocks - active,
        active,
    )
    sent = st.builds(Sent, st.integers(1, 900), st.integers(1, 200), st.booleans())
    return Drawn(load, draw(st.lists(sent, max_size=13)), draw(st.sampled_from([0, 0, 64, 1024])))


def make_record(number: int, pod: Drawn, in_flight: int) -> EndpointRecord:
    """As the brain has it."""
    load = pod.load
    record = EndpointRecord(
        Endpoint(id=f"pod-{number}", data_url="http://127.0.0.1:1", control_url="http://127.0.0.1:2"),
        "sim",
        EndpointReports(stale_after_s=1e9),
        in_flight=in_flight,
    )
    reported = EngineLoad(
        num_blocks_total=LIMITS.num_blocks,
        num_blocks_free=load.num_blocks_available,
        num_blocks_active=load.num_blocks_active,
        num_requests_running=load.num_running,
        num_requests_waiting=load.num_waiting,
        num_tokens_running=load.num_tokens_running,
        num_tokens_waiting=load.num_tokens_waiting,
    )
    frame = StateFrame(
        sequence=1, snapshot=True, load=reported, block_size=LIMITS.block_size, max_num_seqs=LIMITS.max_num_seqs
    )
    record.reports.accept(frame, 1_000_000, 0.0)
    return record


def make_candidate(number: int, pod: Drawn, in_flight: int, last_chosen: int) -> Candidate:
    load = pod.load
    budget = LIMITS.max_num_batched_tokens
    snapshot = take_snapshot(STEPS.model, budget, load.num_running, load.num_tokens_running)
    report = PodReport(
        block_size=LIMITS.block_size,
        max_step_tokens=budget,
        max_num_seqs=LIMITS.max_num_seqs,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_tokens_running=load.num_tokens_running,
        num_tokens_waiting=load.num_tokens_waiting,
        num_blocks_total=LIMITS.num_blocks,
        num_blocks_available=load.num_blocks_available,
        num_blocks_active=load.num_blocks_active,
        step_time=snapshot,
    )
    missing = [each.num_prompt_tokens for each in pod.sent if not each.is_reported]
    return Candidate(
        f"pod-{number}",
        in_flight,
        0,
        last_chosen,
        report,
        True,
        pod.num_cached_tokens,
        num_unreported=len(missing),
        num_unreported_tokens=sum(missing),
    )


def real_choice(
    drawn: list[Drawn], reserved: list[Reservations], last_chosen: list[int], need: Need, mean: float
) -> int | None:
    """As `brain.placement.placement` does it."""
    candidates, records = [], []
    for number, pod in enumerate(drawn):
        candidates.append(make_candidate(number, pod, len(pod.sent), last_chosen[number]))
        records.append(make_record(number, pod, len(pod.sent)))
        records[-1].reserved = reserved[number]
    view = RequestView(need.num_prompt_tokens, mean)

    def fits(number: int) -> bool:
        return has_capacity(records[number], need.with_cached(drawn[number].num_cached_tokens), 0.0)

    chosen = candidates.index(CostPolicy().choose(view, candidates).chosen)
    if fits(chosen):
        return chosen
    roomy = [number for number in range(len(drawn)) if fits(number)]
    if not roomy:
        return None
    among = [candidates[number] for number in roomy]
    return roomy[among.index(CostPolicy().choose(view, among).chosen)]


def pod_of(
    num_running: int, num_tokens_running: int, num_blocks_active: int, sent: list[Sent], num_cached_tokens: int = 0
) -> Drawn:
    num_available = LIMITS.num_blocks - num_blocks_active
    load = PodLoad(num_running, 0, num_tokens_running, 0, num_available, num_blocks_active)
    return Drawn(load, sent, num_cached_tokens)


# A pod whose blocks are still held while no request is there any more: nothing there is waited for.
@example(drawn=[pod_of(0, 0, 372, []), pod_of(0, 0, 0, [])], num_prompt_tokens=448, num_output_tokens=1, mean=36.0).via(
    "a fresh draw"
)
# Costs that differ by exactly what still counts as equal: the last bit of a sum decides.
@example(
    drawn=[pod_of(1, 280, 100, [Sent(5, 5, True)]), pod_of(1, 2780, 100, [])],
    num_prompt_tokens=10,
    num_output_tokens=1,
    mean=1.0,
).via("a search for equal costs")
@example(
    drawn=[pod_of(1, 301, 100, [Sent(5, 5, True)]), pod_of(1, 2801, 100, [])],
    num_prompt_tokens=65,
    num_output_tokens=1,
    mean=1.0,
).via("a search for equal costs")
@settings(max_examples=num_examples(200), deadline=None)
@given(
    drawn=st.lists(pods(), min_size=1, max_size=6),
    num_prompt_tokens=st.integers(1, 4000),
    num_output_tokens=st.integers(1, 300),
    mean=st.floats(1.0, 500.0),
)
def test_a_request_goes_where_the_gateway_would_send_it(
    drawn: list[Drawn], num_prompt_tokens: int, num_output_tokens: int, mean: float
) -> None:
    table = PodTable(LIMITS, STEPS)
    slots = [table.open(pod.load) for pod in drawn]
    last_chosen = [0] * len(drawn)
    for number, (slot, pod) in enumerate(zip(slots, drawn, strict=True)):
        for each in pod.sent:
            need = Need(each.num_prompt_tokens, each.num_prompt_tokens, each.num_output_tokens)
            last_chosen[number] = table.account(slot, need)
            if each.is_reported:
                table.reserved(slot).accepted(last_chosen[number])
        table.reserved(slot).reported()
        table.reserved(slot).reported()
        missing = [each.num_prompt_tokens for each in pod.sent if not each.is_reported]
        table.observe(slot, pod.load, len(missing), sum(missing))
    need = Need(num_prompt_tokens, num_prompt_tokens, num_output_tokens)
    cached = {slot: pod.num_cached_tokens for slot, pod in zip(slots, drawn, strict=True) if pod.num_cached_tokens}
    expected = real_choice(drawn, [table.reserved(slot) for slot in slots], last_chosen, need, mean)
    chosen = table.choose(num_prompt_tokens, mean, need, cached)
    assert chosen == (None if expected is None else slots[expected])


def test_a_pod_that_is_closed_gets_nothing_and_its_slot_is_used_again() -> None:
    table, idle = PodTable(LIMITS, STEPS), PodLoad(0, 0, 0, 0, LIMITS.num_blocks, 0)
    need = Need(10, 10, 10)
    assert table.choose(10, 100.0, need) is None
    first, second = table.open(idle), table.open(idle)
    table.account(first, need)
    assert table.choose(10, 100.0, need) == second
    table.close(second)
    assert table.choose(10, 100.0, need) == first
    table.close(first)
    assert table.choose(10, 100.0, need) is None
    table.forget(second)
    assert table.open(idle) == second
    assert table.choose(10, 100.0, need) == second
