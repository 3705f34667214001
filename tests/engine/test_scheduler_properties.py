"""Random workloads on a checking device: for every schedule, each request gets the answer that it gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.block_pool import BlockPool, KVCacheError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.prefix_cache import PrefixCache
from pagemill_engine.kv.tables import KindTable, Match
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.config import SpeculationConfig
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import LOW_PRIORITY, SamplingParams

MAX_MODEL_LEN = 48
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)
Make = Callable[..., Any]


@st.composite
def workloads(draw: st.DrawFn) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=draw(prompts),
            sampling=SamplingParams(
                n=draw(st.integers(1, 3)),
                max_tokens=draw(st.one_of(st.none(), st.integers(1, 20))),
                seed=draw(st.integers(0, 3)),
            ),
            priority=draw(st.sampled_from([0, 1, 2, LOW_PRIORITY])),
        )
        for index in range(draw(st.integers(1, 7)))
    ]


engine_settings = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 40),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority", "shortest-prefill-first"]),
        "overlap": st.booleans(),
        "windows": st.sampled_from([(None,), (None, 5), (None, 9, 4), (6,)]),
        "stages": st.sampled_from([1, 1, 2, 3]),
    }
)
# 12 blocks of 4 slots have exactly the capacity of one request of the longest kind.
numbers_of_blocks = st.integers(12, 40)


def make_core(
    make: Make, num_blocks: int, windows: tuple[int | None, ...] = (None,), stages: int = 1, **options: Any
) -> EngineCore:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": MAX_MODEL_LEN, "vocab_size": 7}
    runner = make(**sizes, windows=windows, stages=stages)
    config = EngineConfig(
        model="m", block_size=4, eos_token_ids=[6], speculative=SpeculationConfig(method="off"), **options
    )
    return EngineCore(config, runner)


def all_choices(requests: list[GenerateRequest]) -> set[tuple[str, int]]:
    return {(request.request_id, choice) for request in requests for choice in range(request.sampling.n)}


def serve(core: EngineCore, requests: list[GenerateRequest], stagger: int = 0) -> dict[tuple[str, int], list[int]]:
    """Run all requests and check every step's invariants; return all answers."""
    answers: dict[tuple[str, int], list[int]] = {}
    ends: Counter[tuple[str, int]] = Counter()
    queue = list(requests)
    while queue or core.has_work:
        for _ in range(min(len(queue), stagger or len(queue))):
            core.add(queue.pop(0))
        step = core.step()
        core.check_integrity()
        assert step.num_step_tokens <= core.config.max_num_batched_tokens
        assert step.load.num_requests_running <= core.config.max_num_seqs
        assert step.num_step_tokens > 0 or not core.has_work, "a step must run while requests exist"
        for output in step.outputs:
            assert output.error is None, output.error
            key = (output.request_id, output.choice)
            assert ends[key] == 0, "an answer must not continue after its end"
            answers.setdefault(key, []).extend(output.token_ids)
            ends[key] += output.finish_reason is not None
    assert set(ends) == all_choices(requests)
    assert set(ends.values()) <= {1}
    load = core.load()
    assert (load.num_kv_bytes_active, load.num_requests_running, load.num_requests_waiting) == (0, 0, 0)
    assert (load.num_tokens_running, load.num_tokens_waiting) == (0, 0)
    return answers


@settings(
    max_examples=num_examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(workloads(), engine_settings, numbers_of_blocks, st.integers(0, 2))
def test_every_request_ends_once_with_the_answer_that_it_gets_alone(
    checking_runner: Make, requests: list[GenerateRequest], options: dict[str, Any], num_blocks: int, stagger: int
) -> None:
    answers = serve(make_core(checking_runner, num_blocks, **options), requests, stagger)
    for request in requests:
        alone = make_core(checking_runner, 64, max_num_batched_tokens=64, enable_prefix_caching=False)
        for key, token_ids in serve(alone, [request]).items():
            assert answers[key] == token_ids


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), engine_settings, numbers_of_blocks, st.data())
def test_aborts_at_any_time_leave_no_state(
    checking_runner: Make,
    requests: list[GenerateRequest],
    options: dict[str, Any],
    num_blocks: int,
    data: st.DataObject,
) -> None:
    core = make_core(checking_runner, num_blocks, **options)
    for request in requests:
        core.add(request)
    ends: Counter[tuple[str, int]] = Counter()
    while core.has_work:
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(requests))
            core.abort(victim.request_id, data.draw(st.sampled_from([None, *range(victim.sampling.n)])))
            core.check_integrity()
        for output in core.step().outputs:
            ends[output.request_id, output.choice] += output.finish_reason is not None
        core.check_integrity()
    assert ends == Counter(
        {(request.request_id, choice) for request in requests for choice in range(request.sampling.n)}
    )
    assert core.load().num_kv_bytes_active == 0


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), engine_settings, numbers_of_blocks, st.data())
def test_failing_steps_and_rows_fail_no_other_request(
    checking_runner: Make,
    requests: list[GenerateRequest],
    options: dict[str, Any],
    num_blocks: int,
    data: st.DataObject,
) -> None:
    """A poison request fails every step that contains it; single rows fail at random."""
    core = make_core(checking_runner, num_blocks, **options)
    poison = data.draw(st.sampled_from(requests)).request_id
    core.runner.raise_on = lambda plan: any(name.startswith(f"{poison}/") for name in plan.num_scheduled_tokens)
    shaky = data.draw(st.sampled_from(requests)).request_id
    core.runner.fail_rows = lambda plan: {
        name: "not finite" for name in plan.num_scheduled_tokens if name == f"{shaky}/0" and plan.step % 3 == 0
    }
    for request in requests:
        core.add(request)
    answers: dict[tuple[str, int], list[int]] = {}
    errors: Counter[str] = Counter()
    ends: Counter[tuple[str, int]] = Counter()
    while core.has_work:
        for output in core.step().outputs:
            key = (output.request_id, output.choice)
            answers.setdefault(key, []).extend(output.token_ids)
            errors[output.request_id] += output.error is not None
            ends[key] += output.finish_reason is not None
        core.check_integrity()
    assert ends == Counter(
        {(request.request_id, choice) for request in requests for choice in range(request.sampling.n)}
    )
    by_id = {request.request_id: request for request in requests}
    assert errors[poison] == by_id[poison].sampling.n
    for request in requests:
        if request.request_id in (poison, shaky):
            continue
        assert errors[request.request_id] == 0
        alone = make_core(checking_runner, 64, max_num_batched_tokens=64, enable_prefix_caching=False)
        for key, token_ids in serve(alone, [request]).items():
            assert answers[key] == token_ids


def pressing_requests() -> list[GenerateRequest]:
    """Return more requests than the cache can hold, with shared prefixes and forks."""
    shared = [index % 5 for index in range(17)]
    return [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=shared[: 5 + 3 * (index % 5)] + [index % 7] * (index % 3),
            sampling=SamplingParams(n=1 + index % 3, max_tokens=6 + index % 9, ignore_eos=True, seed=index),
        )
        for index in range(14)
    ]


def pressed_core(make: Make, overlap: bool, windows: tuple[int | None, ...] = (None,)) -> EngineCore:
    return make_core(make, 16, windows, max_num_seqs=6, max_num_batched_tokens=24, overlap=overlap)


both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


@both_loops
def test_the_same_workload_gives_the_same_plans(checking_runner: Make, overlap: bool) -> None:
    cores = [pressed_core(checking_runner, overlap) for _ in range(2)]
    answers = [serve(core, pressing_requests(), stagger=3) for core in cores]
    assert answers[0] == answers[1]
    assert cores[0].runner.plans == cores[1].runner.plans
    assert cores[0].scheduler.num_preemptions > 0
    assert any(plan.tables[0].copies for plan in cores[0].runner.plans)


@both_loops
def test_with_a_full_cache_requests_finish_in_order_of_arrival(checking_runner: Make, overlap: bool) -> None:
    """The oldest running row is never preempted, so no row waits forever."""
    core = pressed_core(checking_runner, overlap)
    requests = [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=[index % 7] * 12,
            sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        )
        for index in range(12)
    ]
    order = []
    for request in requests:
        core.add(request)
    while core.has_work:
        order += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
    assert core.scheduler.num_preemptions > 0
    assert order == [request.request_id for request in requests]


def _share_without_counting(self: BlockPool, blocks: Any) -> None:
    for block in blocks:
        if block.ref_count == 0:
            self.free_list.remove(block)
            block.ref_count = 1


def _never_copy(self: CacheManager, own: KindTable, num_computed: int) -> bool:
    return False


def _release_too_little(self: BlockPool, blocks: Any) -> None:
    for block in list(blocks)[1:]:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_list.append(block)


def _evict_without_forgetting(self: PrefixCache, block: Any) -> None:
    block.block_hash = None


def _hit_every_token(self: CacheManager, row: Any, limit_tokens: int | None) -> Match:
    cached = self.caches[0].prefixes
    found = [cached.get(self._block_hash(row, index)) for index in range(len(row.token_ids) // 4)]
    return Match(4 * len(found), [[block for block in found if block is not None]]) if all(found) else Match(0, ())


def _hash_without_parent(self: CacheManager, row: Any, index: int) -> bytes:
    return repr(row.token_ids[index * 4 : index * 4 + 4]).encode()


@both_loops
@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [
        (BlockPool, "share", _share_without_counting),
        (BlockPool, "release", _release_too_little),
        (CacheManager, "_needs_copy", _never_copy),
        (CacheManager, "match", _hit_every_token),
        (CacheManager, "_block_hash", _hash_without_parent),
        (PrefixCache, "remove", _evict_without_forgetting),
    ],
)
def test_a_planted_fault_is_detected(
    monkeypatch: pytest.MonkeyPatch,
    checking_runner: Make,
    owner: type,
    method: str,
    fault: Callable[..., Any],
    overlap: bool,
) -> None:
    serve(pressed_core(checking_runner, overlap), pressing_requests(), stagger=3)
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((KVCacheError, AssertionError)):
        serve(pressed_core(checking_runner, overlap), pressing_requests(), stagger=3)


@both_loops
def test_a_row_reads_the_padding_block_where_its_window_has_passed(checking_runner: Make, overlap: bool) -> None:
    core = pressed_core(checking_runner, overlap, (None, 6))
    serve(core, pressing_requests(), stagger=3)
    dropped = [entry for plan in core.runner.plans for entry in plan.tables[1].dropped]
    assert dropped
    assert all(first < end for _, first, end in dropped)
    assert not any(plan.tables[0].dropped for plan in core.runner.plans)


@both_loops
@pytest.mark.parametrize("num_tokens", range(5, 22))
def test_choices_share_a_prompt_that_is_longer_than_the_window(
    checking_runner: Make, overlap: bool, num_tokens: int
) -> None:
    """Without a prefix cache, a block that was dropped before they forked would be lost to them."""
    core = make_core(checking_runner, 40, (None, 5), enable_prefix_caching=False, overlap=overlap)
    core.add(
        GenerateRequest(
            request_id="a",
            model="m",
            prompt_token_ids=[index % 6 for index in range(num_tokens)],
            sampling=SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=1),
        )
    )
    while core.has_work:
        core.step()
        core.check_integrity()
    starts = [each.num_computed_tokens for plan in core.runner.plans for each in plan.admitted]
    assert starts == [0, num_tokens - 1, num_tokens - 1]
