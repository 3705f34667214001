"""The scheduler's decisions, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.integrity import check_integrity
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


def make_scheduler(**settings: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 100,
        "vocab_size": 1000,
        "max_num_batched_tokens": 16,
        "seed": 7,
    }
    return Scheduler(SchedulerLimits(**{**defaults, **settings}), clock=lambda: 0.0)


def request(name: str, num_tokens: int = 5, first: int = 0, priority: int = 0, **sampling: Any) -> GenerateRequest:
    params = {"max_tokens": 4, "ignore_eos": True, **sampling}
    prompt = [(first + index) % 1000 for index in range(num_tokens)]
    return GenerateRequest(
        request_id=name, model="m", prompt_token_ids=prompt, sampling=SamplingParams(**params), priority=priority
    )


def run(scheduler: Scheduler, token_id: int = 500) -> StepPlan:
    """Run one step in which every sampling row gets `token_id`; return its plan."""
    plan = scheduler.schedule()
    if plan.num_scheduled_tokens:
        scheduler.update(plan, StepResult(token_ids={key: [token_id] for key in plan.samples}))
    check_integrity(scheduler.kv)
    return plan


def finish_reasons(outputs: list[TokensOut]) -> dict[tuple[str, int], str]:
    return {(out.request_id, out.choice): out.finish_reason for out in outputs if out.finish_reason is not None}


def refusal(action: Callable[[], object]) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        action()
    return caught.value


def test_a_long_prompt_is_computed_in_chunks_within_the_token_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 40))
    plans = [run(scheduler) for _ in range(4)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a/0": 16}, {"a/0": 16}, {"a/0": 8}, {"a/0": 1}]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1, 1]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 0, 0]


def test_decodes_are_scheduled_first_then_running_prefills_then_waiting_requests() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("decode", 4, max_tokens=9))
    run(scheduler)
    scheduler.add(request("prefill", 30, first=100))
    run(scheduler)
    scheduler.add(request("new", 8, first=200))
    assert list(run(scheduler).num_scheduled_tokens.items()) == [("decode/0", 1), ("prefill/0", 15)]
    assert run(scheduler).num_scheduled_tokens == {"decode/0": 1, "prefill/0": 1, "new/0": 8}


def test_only_the_blocks_of_this_step_are_allocated() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 40))
    run(scheduler)
    assert scheduler.kv.caches[0].pool.num_active == 4


def test_no_more_rows_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2, first=ord(name)))
    run(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_fcfs_ignores_priority_and_the_priority_policy_does_not() -> None:
    orders = {}
    for policy in ("fcfs", "priority"):
        scheduler = make_scheduler(policy=policy, max_num_seqs=1)
        scheduler.add(request("late", 2, priority=5, max_tokens=1))
        scheduler.add(request("soon", 2, first=50, priority=-1, max_tokens=1))
        orders[policy] = [next(iter(run(scheduler).num_scheduled_tokens)) for _ in range(2)]
    assert orders == {"fcfs": ["late/0", "soon/0"], "priority": ["soon/0", "late/0"]}


def test_the_newest_row_of_the_lowest_priority_is_preempted_and_resumes() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    scheduler.add(request("old", 7, max_tokens=14))
    scheduler.add(request("low", 7, first=100, priority=1, max_tokens=14))
    run(scheduler)
    run(scheduler)
    scheduler.add(request("new", 3, first=200, max_tokens=3))
    outputs: list[TokensOut] = []
    preempted = []
    while scheduler.has_work:
        plan = run(scheduler)
        preempted += [name for name in plan.released if name in {"low/0"} and plan.step < 20]
        outputs += scheduler.take_outputs()
    assert preempted[0] == "low/0"
    assert scheduler.num_preemptions == 1
    assert finish_reasons(outputs) == dict.fromkeys([("old", 0), ("low", 0), ("new", 0)], "length")
    assert sum(len(out.token_ids) for out in outputs if out.request_id == "low") == 14
    assert max(out.num_preemptions for out in outputs if out.request_id == "low") == 1


def test_a_row_preempted_in_a_step_leaves_no_trace_in_its_plan() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False, max_num_batched_tokens=12)
    scheduler.add(request("old", 22, max_tokens=1))
    run(scheduler)
    scheduler.add(request("new", 3, first=200, priority=1, max_tokens=8))
    while "old/0" in scheduler._sequences:
        plan = run(scheduler)
        assert plan.num_tokens <= 12
        assert set(plan.tables[0].appended) <= set(plan.num_scheduled_tokens)
        assert plan.samples <= set(plan.num_scheduled_tokens)


@pytest.mark.parametrize("caching", [True, False])
def test_further_choices_fork_once_the_prompt_is_computed(caching: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=caching)
    scheduler.add(request("a", 22, n=3))
    first, second, third = run(scheduler), run(scheduler), run(scheduler)
    assert [set(plan.num_scheduled_tokens) for plan in (first, second)] == [{"a/0"}, {"a/0"}]
    assert third.num_scheduled_tokens == {"a/0": 1, "a/1": 1, "a/2": 1}
    assert [row.num_computed_tokens for row in third.admitted] == [21, 21]
    assert [row.choice for row in third.admitted] == [1, 2]
    # The prompt has six shared blocks except for the partial last one, which two of the three rows copy.
    assert len(third.tables[0].copies) == 2
    assert scheduler.kv.caches[0].pool.num_active == 5 + 3


def test_choices_share_the_prompt_even_if_the_first_one_ends_early() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(request("a", 10, n=3, max_tokens=1))
    run(scheduler)
    assert run(scheduler).num_scheduled_tokens == {"a/1": 1, "a/2": 1}
    assert finish_reasons(scheduler.take_outputs()) == {("a", choice): "length" for choice in range(3)}
    assert scheduler.kv.caches[0].pool.num_active == 0


def test_if_the_first_choice_is_aborted_the_next_one_takes_its_place() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add(request("a", 30, n=3))
    run(scheduler)
    scheduler.abort("a", 0)
    assert run(scheduler).num_scheduled_tokens == {"a/1": 16}
    run(scheduler)
    assert set(run(scheduler).num_scheduled_tokens) == {"a/1", "a/2"}


def test_a_waiting_fork_is_preempted_if_blocks_are_needed() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False, max_num_seqs=1)
    scheduler.add(request("a", 14, n=4, max_tokens=18))
    outputs: list[TokensOut] = []
    while scheduler.has_work:
        run(scheduler)
        outputs += scheduler.take_outputs()
    assert finish_reasons(outputs) == {("a", choice): "length" for choice in range(4)}
    assert scheduler.kv.caches[0].pool.num_free == 8


def test_a_second_prompt_has_its_own_choice_indices() -> None:
    scheduler = make_scheduler()
    first = request("a", 5, n=2)
    scheduler.add(first)
    second = GenerateRequest(
        request_id="a", model="m", prompt_token_ids=[9, 9], sampling=first.sampling, prompt_index=1
    )
    scheduler.add(second)
    outputs: list[TokensOut] = []
    while scheduler.has_work:
        run(scheduler)
        outputs += scheduler.take_outputs()
    assert set(finish_reasons(outputs)) == {("a", choice) for choice in range(4)}


def test_a_second_prompt_is_sampled_with_the_noise_that_it_would_have_alone() -> None:
    scheduler = make_scheduler()
    first = request("a", 5, n=2, seed=3)
    for index in range(2):
        scheduler.add(msgspec.structs.replace(first, prompt_index=index))
    rows = run(scheduler).admitted + run(scheduler).admitted
    assert {(row.request_id, row.choice, row.seed) for row in rows} == {
        (f"a/{number}", number % 2, 3) for number in range(4)
    }


def test_rows_contain_what_the_sampler_needs() -> None:
    scheduler = make_scheduler(eos_token_ids=[2])
    scheduler.add(request("a", 5, seed=11, min_tokens=2, ignore_eos=False))
    scheduler.add(request("b", 5, first=50))
    first, second = run(scheduler).admitted
    assert (first.seed, first.choice, first.eos_token_ids, first.num_prompt_tokens) == (11, 0, [2], 5)
    assert first.sampling.min_tokens == 2
    assert (second.seed, second.eos_token_ids) == (7, [])


def test_requests_without_a_seed_get_a_random_one_each() -> None:
    scheduler = make_scheduler(seed=None)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 2))
    seeds = {row.seed for row in run(scheduler).admitted}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_end_of_sequence_stops_unless_ignored() -> None:
    scheduler = make_scheduler(eos_token_ids=[2])
    scheduler.add(request("stops", 3, ignore_eos=False))
    scheduler.add(request("goes_on", 3, first=50, ignore_eos=True))
    run(scheduler, token_id=2)
    assert finish_reasons(scheduler.take_outputs()) == {("stops", 0): "stop"}


def test_stop_token_ids_stop_even_when_end_of_sequence_is_ignored() -> None:
    scheduler = make_scheduler(eos_token_ids=[2])
    scheduler.add(request("a", 3, stop_token_ids=[33]))
    run(scheduler, token_id=33)
    (output,) = scheduler.take_outputs()
    assert (output.token_ids, output.finish_reason) == ([33], "stop")


def test_no_stop_before_min_tokens() -> None:
    scheduler = make_scheduler(eos_token_ids=[2])
    scheduler.add(request("a", 3, min_tokens=2, max_tokens=9, ignore_eos=False))
    for _ in range(3):
        assert finish_reasons(scheduler.take_outputs()) == {}
        run(scheduler, token_id=2)
    assert finish_reasons(scheduler.take_outputs()) == {("a", 0): "stop"}


def test_without_max_tokens_the_context_length_is_the_limit() -> None:
    scheduler = make_scheduler(max_model_len=12)
    scheduler.add(request("a", 5, max_tokens=None))
    outputs = []
    while scheduler.has_work:
        run(scheduler)
        outputs += scheduler.take_outputs()
    assert sum(len(out.token_ids) for out in outputs) == 7
    assert outputs[-1].finish_reason == "length"


def test_one_request_can_use_the_whole_cache() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)
    scheduler.add(request("a", 5, max_tokens=None))
    outputs = []
    while scheduler.has_work:
        run(scheduler)
        outputs += scheduler.take_outputs()
    assert sum(len(out.token_ids) for out in outputs) == 8
    assert scheduler.num_preemptions == 0


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(max_model_len=20)
    error = refusal(lambda: scheduler.add(request("a", 20)))
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")
    assert "20 tokens" in error.message
    assert not scheduler.has_work


def test_a_prompt_larger_than_the_cache_is_refused_with_the_remedy() -> None:
    scheduler = make_scheduler(num_blocks=3)
    error = refusal(lambda: scheduler.add(request("a", 13)))
    assert error.status == 400
    assert "kvCacheMemory" in error.message


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (GenerateRequest(request_id="a", model="m", prompt_token_ids=[], sampling=SamplingParams()), "prompt"),
        (GenerateRequest(request_id="a", model="m", prompt_token_ids=[5, 1000], sampling=SamplingParams()), "prompt"),
        (GenerateRequest(request_id="a", model="m", prompt_token_ids=[-1], sampling=SamplingParams()), "prompt"),
        (request("a", temperature=float("nan")), "temperature"),
        (request("a", logit_bias={1000: 1.0}), "logit_bias"),
        (request("a", stop_token_ids=[1000]), "stop_token_ids"),
        (msgspec.structs.replace(request("a"), priority=2**31), "priority"),
        (msgspec.structs.replace(request("a"), priority=-(2**31) - 1), "priority"),
    ],
)
def test_a_request_that_would_break_a_step_is_refused(bad: GenerateRequest, param: str) -> None:
    scheduler = make_scheduler()
    error = refusal(lambda: scheduler.add(bad))
    assert (error.status, error.param) == (400, param)
    assert not scheduler.has_work


def test_a_full_queue_refuses_with_503() -> None:
    scheduler = make_scheduler(max_num_waiting=3)
    scheduler.add(request("a", n=2))
    error = refusal(lambda: scheduler.add(request("b", n=2)))
    assert (error.status, error.retry_after_s) == (503, 1)
    scheduler.add(request("c"))
    assert scheduler.num_waiting == 3


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    assert refusal(lambda: scheduler.add(request("a"))).param == "request_id"
    scheduler.abort("a")
    scheduler.add(request("a"))


def test_abort_works_in_every_state_of_a_request() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(request("running", 30))
    scheduler.add(request("held", 4, first=100, n=2))
    scheduler.add(request("waiting", 4, first=200))
    run(scheduler)
    scheduler.abort("waiting")
    scheduler.abort("held", 1)
    scheduler.abort("unknown")
    plan = scheduler.schedule()
    scheduler.abort("running")
    assert scheduler.kv.caches[0].pool.num_active > 0
    scheduler.update(plan, StepResult(token_ids={key: [5] for key in plan.samples}))
    check_integrity(scheduler.kv)
    reasons = finish_reasons(scheduler.take_outputs())
    assert reasons == {("waiting", 0): "abort", ("held", 1): "abort", ("running", 0): "abort"}
    scheduler.abort("held")
    assert not scheduler._sequences
    assert scheduler.kv.caches[0].pool.num_active == 0


def test_an_abort_reaches_the_runner_with_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    run(scheduler)
    scheduler.abort("a")
    assert run(scheduler).num_scheduled_tokens == {}
    scheduler.add(request("b"))
    assert run(scheduler).released == ["a/0"]


def test_a_resumed_choice_continues_at_its_position() -> None:
    scheduler = make_scheduler()
    base = request("a", 5, max_tokens=4)
    scheduler.add(
        GenerateRequest(
            request_id="a",
            model="m",
            prompt_token_ids=base.prompt_token_ids,
            sampling=base.sampling,
            resume=[ChoiceResume(0, [70, 71, 72], 3)],
        )
    )
    (row,) = run(scheduler, token_id=73).admitted
    assert row.token_ids == [*base.prompt_token_ids, 70, 71, 72]
    assert row.num_prompt_tokens == 5
    (output,) = scheduler.take_outputs()
    assert (output.token_ids, output.finish_reason) == ([73], "length")


def test_a_choice_that_is_resumed_at_its_end_ends_at_once() -> None:
    scheduler = make_scheduler(eos_token_ids=[2])
    sampling = SamplingParams(n=3, max_tokens=5)
    scheduler.add(
        GenerateRequest(
            request_id="a",
            model="m",
            prompt_token_ids=[1, 3],
            sampling=sampling,
            resume=[ChoiceResume(0, [7, 2], 1), ChoiceResume(1, [8], 1, finished=True)],
        )
    )
    assert finish_reasons(scheduler.take_outputs()) == {("a", 0): "stop"}
    assert list(scheduler._sequences) == ["a/2"]
    for _ in range(6):
        run(scheduler)
    assert finish_reasons(scheduler.take_outputs()) == {("a", 2): "length"}
    assert not scheduler.has_work


def test_an_invalid_resume_is_refused() -> None:
    scheduler = make_scheduler()
    for resume in ([ChoiceResume(1, [5], 1)], [ChoiceResume(0, [5000], 1)], [ChoiceResume(0, [5], 1, finished=True)]):
        bad = GenerateRequest(request_id="a", model="m", prompt_token_ids=[1], sampling=SamplingParams(), resume=resume)
        assert refusal(lambda bad=bad: scheduler.add(bad)).param == "resume"
    assert not scheduler.has_work


def test_the_first_output_reports_the_cached_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 12, max_tokens=2))
    while scheduler.has_work:
        run(scheduler)
        scheduler.take_outputs()
    scheduler.add(request("b", 12, max_tokens=2))
    run(scheduler)
    run(scheduler)
    assert [out.num_cached_tokens for out in scheduler.take_outputs()] == [8, 0]


def test_salts_separate_the_prefixes_of_tenants() -> None:
    scheduler = make_scheduler()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        scheduler.add(
            GenerateRequest(
                request_id=name,
                model="m",
                prompt_token_ids=list(range(12)),
                sampling=SamplingParams(max_tokens=1),
                cache_salt=salt,
            )
        )
    plan = StepPlan(0, {})
    cached = {}
    while scheduler.has_work:
        plan = run(scheduler)
        cached |= {row.request_id: row.num_computed_tokens for row in plan.admitted}
        scheduler.take_outputs()
    assert cached == {"a/0": 0, "b/0": 0, "c/0": 8}


def test_load_counts_requests_and_tokens() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 10, first=100, n=2))
    assert scheduler.load().num_tokens_waiting == 31
    run(scheduler)
    load = scheduler.load()
    assert (load.num_requests_running, load.num_requests_waiting) == (1, 2)
    assert (load.num_tokens_running, load.num_tokens_waiting) == (16, 4 + 11)
    assert (load.num_kv_bytes_active, load.num_kv_bytes_free, load.num_kv_bytes_evictable) == (4, 60, 0)
    scheduler.abort("a")
    scheduler.abort("b")
    load = scheduler.load()
    assert (load.num_tokens_waiting, load.num_kv_bytes_active, load.num_kv_bytes_evictable) == (0, 0, 4)
    assert load.kv_cache_usage == 0


def test_step_totals_are_the_input_of_the_step_time_model() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 6))
    first = run(scheduler)
    assert (first.decode_context_tokens, first.chunk_context_products) == (0, 36)
    scheduler.add(request("b", 10, first=50))
    second = run(scheduler)
    assert (second.decode_context_tokens, second.chunk_context_products) == (7, 100)


def test_a_step_without_a_token_for_a_row_fails_only_that_row() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 5, first=50))
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(token_ids={"b/0": [5]}))
    check_integrity(scheduler.kv)
    errors = [out for out in scheduler.take_outputs() if out.error is not None]
    assert [(out.request_id, out.finish_reason) for out in errors] == [("a", "error")]
    assert list(scheduler._sequences) == ["b/0"]


def test_readers_of_a_failed_rows_blocks_start_over() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(request("writer", 12))
    scheduler.add(request("reader", 14))
    scheduler.add(request("bystander", 12, first=300))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"writer/0": 12, "reader/0": 2, "bystander/0": 12}
    tokens = {"reader/0": [1], "bystander/0": [1]}
    scheduler.update(plan, StepResult(token_ids=tokens, failed={"writer/0": "not finite"}))
    check_integrity(scheduler.kv)
    outputs = scheduler.take_outputs()
    assert {out.request_id: out.error for out in outputs} == {"writer": "not finite", "bystander": None}
    retry = run(scheduler)
    assert retry.num_scheduled_tokens == {"bystander/0": 1, "reader/0": 14}
    assert set(retry.released) == {"reader/0", "writer/0"}


def test_an_engine_without_adapters_refuses_a_request_for_one_so_that_another_may_take_it() -> None:
    wanted = msgspec.structs.replace(request("a"), adapter_digest="d")
    error = refusal(lambda: make_scheduler().add(wanted))
    assert (error.status, error.code, error.param) == (409, "adapter_not_served", "model")
    assert "serves no adapters" in error.message


def test_requests_for_different_adapters_share_no_kv_blocks() -> None:
    scheduler = make_scheduler(serves_adapters=True)
    for number, digest in enumerate(["", "one", "two", "one", ""]):
        scheduler.add(msgspec.structs.replace(request(f"r{number}", 14, max_tokens=1), adapter_digest=digest))
        run(scheduler)
    assert [out.num_cached_tokens for out in scheduler.take_outputs()] == [0, 0, 0, 12, 12]
