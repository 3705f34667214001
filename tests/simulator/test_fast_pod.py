"""One pod in fast-forward makes the decisions of the real scheduler: equal steps, preemptions and times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.config import EngineConfig
from pagemill_execution.config import SimulatedKinds
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StepTimeParams
from pagemill_simulator.engine import EngineSimulation
from pagemill_simulator.fleet.engines.fast_pod import FastPod
from pagemill_simulator.fleet.engines.fast_sequence import FastSequence
from pagemill_simulator.fleet.engines.fast_steps import StepTimes
from pagemill_simulator.workloads.batches import LINE_PRIORITY
from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.shapes import Steady

STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-4, chunk_context_ms=1e-6
)


def config(**changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": "sim",
        "num_kv_blocks": 4000,
        "max_model_len": 16384,
        "max_num_waiting": 100_000,
        "step_time": STEP_TIME,
    }
    return EngineConfig(**{**defaults, **changes})


def run_fast(trace: Sequence[SimRequest], engine: EngineConfig) -> tuple[FastPod, list[FastSequence]]:
    core = EngineSimulation([], engine).core
    pod = FastPod(
        core.scheduler.limits, StepTimes(STEP_TIME, engine.step.max_num_batched_tokens), overlaps=core.overlaps
    )
    rows = []
    for request in trace:
        pod.advance(request.arrival_s)
        rows.append(FastSequence(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens))
        rows[-1].priority = request.priority
        pod.add(rows[-1], request.arrival_s)
    pod.advance(math.inf)
    return pod, rows


def assert_same(trace: Sequence[SimRequest], engine: EngineConfig) -> FastPod:
    exact = EngineSimulation(trace, engine)
    report = exact.run()
    pod, rows = run_fast(trace, engine)
    for number, (row, latency) in enumerate(zip(rows, exact.latencies, strict=True)):
        assert (row.first_token_s - row.arrival_s) * 1000 == pytest.approx(latency.ttft_ms, abs=1e-3), number
        if latency.tpot_ms is not None:
            tpot_ms = (row.end_s - row.first_token_s) * 1000 / (row.num_output_tokens - 1)
            assert tpot_ms == pytest.approx(latency.tpot_ms, abs=1e-3), number
    assert (pod.num_steps, pod.num_preemptions) == (report.num_steps, report.num_preemptions)
    assert pod.num_sampled_tokens == report.num_output_tokens
    assert pod.busy_s == pytest.approx(report.busy_share * report.duration_s)
    return pod


@pytest.mark.parametrize("rate", [1.0, 6.0, 30.0])
def test_a_trace_takes_the_same_time_as_with_the_scheduler(rate: float) -> None:
    pod = assert_same(Steady(rate=rate, duration_s=200 / rate).requests(int(rate))[:60], config())
    assert pod.kv.num_active == 0
    assert not pod.has_work


def test_answers_that_outgrow_the_cache_are_preempted_like_by_the_scheduler() -> None:
    pod = assert_same([SimRequest(0.02 * number, 30, 300) for number in range(20)], config(num_kv_blocks=150))
    assert pod.num_preemptions > 5


def test_requests_wait_for_a_slot_like_in_the_scheduler() -> None:
    assert_same([SimRequest(0.05 * number, 200, 40) for number in range(25)], config(max_num_seqs=3))


def test_batch_lines_give_way_like_in_the_scheduler() -> None:
    lines = [SimRequest(0.001 * number, 60, 200, priority=LINE_PRIORITY) for number in range(8)]
    live = [SimRequest(0.3 + 0.02 * number, 80, 40) for number in range(12)]
    pod = assert_same([*lines, *live], config(max_num_seqs=6))
    assert pod.num_preemptions >= 6


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first"])
def test_loops_and_scheduling_policies_are_supported(overlap: bool, policy: str) -> None:
    trace = [SimRequest(0.01 * number, 1 + (number * 397) % 900, 1 + (number * 13) % 50) for number in range(40)]
    assert_same(trace, config(overlap=overlap, policy=policy, max_num_seqs=12, num_kv_blocks=600))


requests = st.tuples(
    st.floats(0.0, 0.2),
    st.one_of(st.integers(1, 40), st.integers(1, 700)),
    st.one_of(st.integers(1, 4), st.integers(1, 120)),
    st.sampled_from([0, 0, LINE_PRIORITY]),
)


TWO_AT_ONCE = [(0.55, 1, 54, LINE_PRIORITY), (0.16, 1, 26, 0), (0.144, 1, 2, 0), (0.0, 1, 1, 0)]
"""One of them gets the last slot, and the other one that of the batch line, a step later."""


@settings(max_examples=num_examples(60), deadline=None)
@example(drawn=TWO_AT_ONCE, num_blocks=120, max_num_seqs=3, budget=500, overlap=True, caches=True)
@example(drawn=TWO_AT_ONCE, num_blocks=120, max_num_seqs=3, budget=500, overlap=False, caches=False)
@given(
    drawn=st.lists(requests, min_size=1, max_size=20),
    num_blocks=st.sampled_from([60, 120, 1000]),
    max_num_seqs=st.sampled_from([1, 3, 32]),
    budget=st.sampled_from([32, 64, 500]),
    overlap=st.booleans(),
    caches=st.booleans(),
)
def test_any_small_workload_takes_the_same_time_as_with_the_scheduler(
    drawn: list[tuple[float, int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    overlap: bool,
    caches: bool,
) -> None:
    now, trace = 0.0, []
    for gap_s, num_prompt_tokens, num_output_tokens, priority in drawn:
        now += gap_s
        trace.append(SimRequest(now, num_prompt_tokens, num_output_tokens, priority=priority))
    engine = config(
        num_kv_blocks=num_blocks,
        max_model_len=960,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        overlap=overlap,
        enable_prefix_caching=caches,
    )
    assert_same(trace, engine)


FULL, WINDOW = CacheKind(block_bytes=2), CacheKind("window", 40, block_bytes=3)
STATE = CacheKind("state", state=True, block_bytes=5)
MIXES = [(FULL, WINDOW), (WINDOW,), (FULL, STATE), (STATE,), (FULL, CacheKind("long window", 100), WINDOW)]


@settings(max_examples=num_examples(100), deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=20),
    kinds=st.sampled_from(MIXES),
    size=st.sampled_from([1, 2, 10]),
    max_num_seqs=st.sampled_from([1, 3, 32]),
    budget=st.sampled_from([32, 64, 250]),
    overlap=st.booleans(),
    moves=st.booleans(),
)
def test_rows_hold_of_windows_and_states_what_the_real_cache_holds(
    drawn: list[tuple[float, int, int, int]],
    kinds: tuple[CacheKind, ...],
    size: int,
    max_num_seqs: int,
    budget: int,
    overlap: bool,
    moves: bool,
) -> None:
    """Without a prefix cache every start, wait and preemption is the same, also where memory moves between kinds."""
    now, trace = 0.0, []
    for gap_s, num_prompt_tokens, num_output_tokens, priority in drawn:
        now += gap_s
        trace.append(SimRequest(now, min(num_prompt_tokens, 450), num_output_tokens, priority=priority))
    fewest = {"full": 60, "long window": 40, "window": 30, "state": 6}
    cache = SimulatedKinds(kinds, tuple(size * fewest[kind.name] for kind in kinds), moves)
    engine = config(
        simulated_kinds=cache,
        max_model_len=600,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        overlap=overlap,
        enable_prefix_caching=False,
    )
    pod = assert_same(trace, engine)
    assert not any(each.active for each in pod.further.load())


@pytest.mark.parametrize("further", [WINDOW, STATE], ids=["window", "state"])
def test_a_turn_resumes_only_where_windows_and_states_are_cached(further: CacheKind) -> None:
    cache = SimulatedKinds((FULL, further), (400, 70 if further is WINDOW else 3))
    pod = FastPod(EngineSimulation([], config(simulated_kinds=cache)).core.scheduler.limits, StepTimes(STEP_TIME, 512))
    rows = [
        FastSequence(4.0 * number, 1000 + 30 * number, 5, session) for number, session in enumerate([7, 7, 8, 9, 7])
    ]
    for row in rows:
        pod.advance(row.arrival_s)
        pod.add(row, row.arrival_s)
        pod.advance(row.arrival_s + 3.9)
        if row is rows[1]:
            for other in range(20, 40):  # others need all of the window, or all states
                evicting = FastSequence(row.arrival_s + 3.9, 60, 1, other)
                pod.add(evicting, evicting.arrival_s)
    assert [row.num_cached_tokens for row in rows] == [0, 992, 0, 0, 0]
    assert pod.kv.num_cached_of(7) > 0


@settings(max_examples=num_examples(60), deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=12),
    looks=st.lists(st.floats(0.0, 3.0), max_size=30),
    num_blocks=st.sampled_from([60, 1000]),
)
def test_the_times_at_which_a_pod_is_read_change_nothing(
    drawn: list[tuple[float, int, int, int]], looks: list[float], num_blocks: int
) -> None:
    """The pod is advanced to times in between, and to each time that it names itself."""
    trace = []
    for gap_s, num_prompt_tokens, num_output_tokens, priority in drawn:
        arrival_s = gap_s + (trace[-1].arrival_s if trace else 0.0)
        trace.append(SimRequest(arrival_s, num_prompt_tokens, num_output_tokens, priority=priority))
    engine = config(num_kv_blocks=num_blocks, max_model_len=960)
    _, plain = run_fast(trace, engine)
    pod = FastPod(EngineSimulation([], engine).core.scheduler.limits, StepTimes(STEP_TIME, 512))
    looked: list[FastSequence] = []
    for request in [*trace, None]:
        until_s = request.arrival_s if request is not None else math.inf
        stops = [each for each in sorted(looks) if each < until_s]
        while True:
            stop_s = min(pod.next_news_s() + 1e-9, *stops[:1], until_s)
            if stop_s >= until_s:
                break
            stops = [each for each in stops if each > stop_s]
            pod.advance(stop_s)
            while pod.ended and pod.ended[0].end_s <= stop_s:
                pod.ended.popleft()
        pod.advance(until_s)
        if request is not None:
            looked.append(FastSequence(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens))
            looked[-1].priority = request.priority
            pod.add(looked[-1], request.arrival_s)
    for mine, theirs in zip(looked, plain, strict=True):
        assert mine.first_token_s == pytest.approx(theirs.first_token_s, abs=1e-6)
        assert mine.end_s == pytest.approx(theirs.end_s, abs=1e-6)


def test_a_turn_reuses_the_cache_of_its_session_and_computes_the_rest() -> None:
    limits = EngineSimulation([], config()).core.scheduler.limits
    pod = FastPod(limits, StepTimes(STEP_TIME, 512))
    first = FastSequence(0.0, 1000, 25, session=7)
    pod.add(first, 0.0)
    pod.advance(10.0)
    assert pod.kv.num_cached_of(7) == (1000 + 25 - 1) // 16
    second, stranger = FastSequence(10.0, 1200, 5, session=7), FastSequence(20.0, 1200, 5, session=8)
    pod.add(second, 10.0)
    pod.advance(20.0)
    pod.add(stranger, 20.0)
    pod.advance(30.0)
    assert (second.num_cached_tokens, stranger.num_cached_tokens) == (1024, 0)
    assert second.first_token_s - 10.0 < 0.5 * (stranger.first_token_s - 20.0)


def test_a_pod_that_is_stopped_reports_the_generated_tokens_of_each_request() -> None:
    limits = EngineSimulation([], config()).core.scheduler.limits
    pod = FastPod(limits, StepTimes(STEP_TIME, 512))
    rows = [FastSequence(0.0, 100, 1000), FastSequence(0.0, 100, 3), FastSequence(0.5, 4000, 10)]
    for row in rows:
        pod.advance(row.arrival_s)
        pod.add(row, row.arrival_s)
    pod.advance(0.52)
    made = dict(zip(("long", "prompt"), [count for _, count in pod.cut(0.52)], strict=True))
    assert made["prompt"] == 0
    assert made["long"] == pytest.approx((0.52 - 0.01) / 0.0061, rel=0.1)
