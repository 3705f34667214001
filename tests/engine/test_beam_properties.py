"""Random mixtures of beam searches, `best_of` and other requests get the answers that each gets alone.

All blocks are freed in the end, whatever is preempted, aborted or failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.config import EngineConfig
from pagemill_engine.kv.block_pool import KVCacheError
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.tables import KindTable
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.beams import most_blocks
from pagemill_execution.config import SpeculationConfig
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
VOCAB_SIZE = 11
EOS = [10]
Make = Callable[..., Any]
Answers = dict[tuple[str, int], list[int]]

engine_settings = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "overlap": st.booleans(),
        "max_num_batched_tokens": st.integers(1, 40),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority", "shortest-prefill-first"]),
    }
)
numbers_of_blocks = st.integers(12, 40)
WIDEST = 4
LONGEST = 10
"""Beams x tokens of any search in these tests fit into 12 blocks with the prompt."""


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    kind = draw(st.sampled_from(["beams", "beams", "best_of", "n"]))
    width = draw(st.integers(1, WIDEST))
    n = draw(st.integers(1, width))
    if kind == "n":
        return SamplingParams(n=n, max_tokens=draw(st.integers(1, 20)), seed=draw(st.integers(0, 3)))
    if kind == "best_of":
        return SamplingParams(n=n, best_of=width, max_tokens=draw(st.integers(1, 12)), seed=draw(st.integers(0, 3)))
    return SamplingParams(
        n=n,
        best_of=width,
        use_beam_search=True,
        length_penalty=draw(st.sampled_from([0.0, 1.0, -1.0, 2.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        max_tokens=draw(st.integers(1, LONGEST)),
        min_tokens=draw(st.integers(0, 1)),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{index}",
            model="m",
            prompt_token_ids=draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)),
            sampling=draw(samplings()),
            priority=draw(st.integers(0, 2)),
        )
        for index in range(draw(st.integers(1, 5)))
    ]


def make_core(make: Make, num_blocks: int = 64, **options: Any) -> EngineCore:
    runner = make(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    settings = SpeculationConfig(method="off")
    config = EngineConfig(model="m", block_size=BLOCK_SIZE, eos_token_ids=EOS, speculative=settings, **options)
    return EngineCore(config, runner)


def choices_of(request: GenerateRequest) -> set[tuple[str, int]]:
    return {(request.request_id, choice) for choice in range(request.sampling.num_reported)}


def admitted(core: EngineCore, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Add the requests; only a search larger than the cache may be refused. Return the added ones."""
    taken = []
    for request in requests:
        try:
            core.add(request)
        except PagemillError as error:
            if error.param != "beam_width":
                raise
        else:
            taken.append(request)
    return taken


def drain(core: EngineCore) -> tuple[Answers, Counter[tuple[str, int]], Counter[str]]:
    """Run all requests and check every step's invariants; return answers, numbers of ends, and errors."""
    answers: Answers = {}
    ends: Counter[tuple[str, int]] = Counter()
    errors: Counter[str] = Counter()
    while core.has_work:
        step = core.step()
        core.check_integrity()
        for out in step.outputs:
            key = (out.request_id, out.choice)
            assert ends[key] == 0, "an answer must not continue after its end"
            answers.setdefault(key, []).extend(out.token_ids)
            ends[key] += out.finish_reason is not None
            errors[out.request_id] += out.error is not None
        assert step.num_step_tokens > 0 or step.outputs or not core.has_work, "a step must run while requests exist"
    load = core.load()
    assert (load.num_kv_bytes_active, load.num_requests_running, load.num_requests_waiting) == (0, 0, 0)
    assert (load.num_tokens_running, load.num_tokens_waiting) == (0, 0)
    return answers, ends, errors


def assert_as_alone(make: Make, requests: list[GenerateRequest], answers: Answers) -> None:
    for request in requests:
        alone = make_core(make, max_num_batched_tokens=64, enable_prefix_caching=False)
        alone.add(request)
        for key, token_ids in drain(alone)[0].items():
            assert answers[key] == token_ids


@settings(max_examples=num_examples(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), engine_settings, numbers_of_blocks)
def test_every_search_ends_once_with_the_answers_that_it_finds_alone(
    checking_runner: Make, requests: list[GenerateRequest], options: dict[str, Any], num_blocks: int
) -> None:
    core = make_core(checking_runner, num_blocks, **options)
    requests = admitted(core, requests)
    answers, ends, errors = drain(core)
    assert ends == Counter(key for request in requests for key in choices_of(request))
    assert not +errors
    assert_as_alone(checking_runner, requests, answers)


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), engine_settings, numbers_of_blocks, st.data())
def test_an_abort_at_any_time_ends_a_search_as_a_whole(
    checking_runner: Make,
    requests: list[GenerateRequest],
    options: dict[str, Any],
    num_blocks: int,
    data: st.DataObject,
) -> None:
    core = make_core(checking_runner, num_blocks, **options)
    requests = admitted(core, requests)
    ends: Counter[tuple[str, int]] = Counter()
    while core.has_work:
        if requests and data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(requests))
            core.abort(victim.request_id, data.draw(st.sampled_from([None, *range(victim.sampling.num_reported)])))
            core.check_integrity()
        for out in core.step().outputs:
            ends[out.request_id, out.choice] += out.finish_reason is not None
        core.check_integrity()
    assert ends == Counter(key for request in requests for key in choices_of(request))
    assert core.load().num_kv_bytes_active == 0


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), engine_settings, numbers_of_blocks, st.data())
def test_a_failed_row_fails_its_search_and_no_other(
    checking_runner: Make,
    requests: list[GenerateRequest],
    options: dict[str, Any],
    num_blocks: int,
    data: st.DataObject,
) -> None:
    core = make_core(checking_runner, num_blocks, **options)
    requests = admitted(core, requests)
    if not requests:
        return
    poison = data.draw(st.sampled_from(requests)).request_id
    steps = data.draw(st.integers(0, 6))
    whole = data.draw(st.booleans())

    def poisoned(plan: Any) -> list[str]:
        names = [name for name in plan.num_scheduled_tokens if name.split("/")[0] == poison]
        return names[-1:] if plan.step > steps else []

    if whole:
        core.runner.raise_on = lambda plan: bool(poisoned(plan))
    else:
        core.runner.fail_rows = lambda plan: dict.fromkeys(poisoned(plan), "made to fail")
    answers, ends, errors = drain(core)
    assert ends == Counter(key for request in requests for key in choices_of(request))
    assert set(+errors) <= {poison}
    assert_as_alone(checking_runner, [request for request in requests if request.request_id != poison], answers)


def search_of(num_prompt_tokens: int, width: int, max_tokens: int, name: str = "a") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt_token_ids=[1, 0] * (num_prompt_tokens // 2),
        sampling=SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, ignore_eos=True),
    )


def test_beams_share_their_prompt_and_copy_only_the_blocks_that_they_write(checking_runner: Make) -> None:
    core = make_core(checking_runner, enable_prefix_caching=False)
    core.add(search_of(20, 4, 12))
    most = copies = 0
    while core.has_work:
        core.step()
        most = max(most, core.scheduler.kv.usage()[0].num_active)
        copies += len(core.runner.plans[-1].tables[0].copies)
    # A row has 31 tokens with KV: 8 blocks, of which 5 are the prompt's.
    assert most <= 5 + 4 * 3
    assert most == most_blocks(search_of(20, 4, 12).sampling, 20, 32, BLOCK_SIZE) or most < 4 * 8
    assert 0 < copies < 11 * 4


def test_the_last_user_of_a_shared_block_writes_into_it(checking_runner: Make) -> None:
    """Two beams fork inside a block: one copy is made, not two."""
    core = make_core(checking_runner, enable_prefix_caching=False)
    core.add(search_of(6, 2, 3))
    copies = []
    while core.has_work:
        core.step()
        copies.append(len(core.runner.plans[-1].tables[0].copies))
    assert copies[:2] == [0, 1]


def test_a_search_that_cannot_fit_is_refused_with_the_reason(checking_runner: Make) -> None:
    core = make_core(checking_runner, 20)
    with pytest.raises(PagemillError) as refused:
        core.add(search_of(20, 8, 20))
    assert refused.value.param == "beam_width"
    assert "8 beams for up to 20 tokens may need 45 KV blocks of 4 tokens; this engine has 20" in refused.value.message
    core.add(search_of(20, 3, 20))
    assert drain(core)[1] == Counter({("a", choice): 1 for choice in range(3)})


def test_a_search_with_more_beams_than_slots_runs_in_turns(checking_runner: Make) -> None:
    core = make_core(checking_runner, max_num_seqs=2)
    core.add(search_of(8, 6, 6))
    answers, _, _ = drain(core)
    assert_as_alone(checking_runner, [search_of(8, 6, 6)], answers)


def test_beams_between_two_steps_count_as_running(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    core.add(search_of(8, 4, 6))
    core.step()
    load = core.load()
    assert (load.num_requests_running, load.num_requests_waiting) == (4, 0)


def test_only_a_search_whose_stop_tokens_leave_no_candidate_fails(checking_runner: Make) -> None:
    core = make_core(checking_runner)
    sampling = SamplingParams(
        n=2, use_beam_search=True, max_tokens=8, min_tokens=4, stop_token_ids=list(range(VOCAB_SIZE))
    )
    core.add(GenerateRequest(request_id="a", model="m", prompt_token_ids=[1], sampling=sampling))
    _, ends, errors = drain(core)
    assert (ends, errors) == (Counter({("a", 0): 1, ("a", 1): 1}), Counter({"a": 2}))


def pressing_requests() -> list[GenerateRequest]:
    plain = [
        GenerateRequest(
            request_id=f"plain{index}",
            model="m",
            prompt_token_ids=[index % 3] * 9,
            sampling=SamplingParams(n=2, max_tokens=24, ignore_eos=True, seed=index),
        )
        for index in range(3)
    ]
    return [plain[0], search_of(8, 3, 14, "a"), plain[1], search_of(8, 3, 14, "b"), plain[2]]


def test_preempted_searches_are_computed_again_with_the_same_result(checking_runner: Make) -> None:
    core = make_core(checking_runner, 20, max_num_seqs=12, enable_prefix_caching=False)
    for request in pressing_requests():
        core.add(request)
    answers, _, errors = drain(core)
    restarts = [
        row.request_id
        for plan in core.runner.plans
        for row in plan.admitted
        if row.request_id[0] in "ab" and row.num_computed_tokens == 0 and len(row.token_ids) > row.num_prompt_tokens
    ]
    assert restarts, "no beam was preempted"
    assert not +errors
    assert_as_alone(checking_runner, pressing_requests(), answers)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["search", "choices"])
def test_a_waiting_row_with_blocks_does_not_lose_them_to_a_lower_priority(
    checking_runner: Make, overlap: bool, kind: str
) -> None:
    """Beams between two steps and choices that wait for a slot are in no batch, but they are not preempted first."""
    core = make_core(checking_runner, 14, max_num_seqs=2, overlap=overlap, enable_prefix_caching=False)
    sampling = SamplingParams(n=3, use_beam_search=kind == "search", max_tokens=8, ignore_eos=True, seed=1)
    important = GenerateRequest(
        request_id="important", model="m", prompt_token_ids=[1, 0] * 4, sampling=sampling, priority=0
    )
    cheap = GenerateRequest(
        request_id="cheap",
        model="m",
        prompt_token_ids=[0] * 6,
        sampling=SamplingParams(max_tokens=38, ignore_eos=True, seed=2),
        priority=1,
    )
    core.add(cheap)
    for _ in range(20):
        core.step()
    core.add(important)
    answers, _, errors = drain(core)
    admitted_anew = Counter(
        row.request_id.split("/")[0]
        for plan in core.runner.plans
        for row in plan.admitted
        if row.num_computed_tokens == 0
    )
    assert admitted_anew["important"] == 1, "its blocks were given to a request of lower priority"
    assert admitted_anew["cheap"] > 1, "the cache was never full"
    assert not +errors
    assert len(answers["cheap", 0]) == 38 - 20
    assert_as_alone(checking_runner, [important], answers)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prefill-first"])
def test_beams_decode_in_every_step_however_many_prompts_wait(checking_runner: Make, policy: str) -> None:
    """The prompts fill the budget of every step, and all policies but one rank them before the search's own."""
    core = make_core(checking_runner, policy=policy, max_num_batched_tokens=12, enable_prefix_caching=False)
    core.add(search_of(24, 3, 10))
    for index in range(16):
        if index >= 2:
            prompt = GenerateRequest(
                request_id=f"prompt{index}",
                model="m",
                prompt_token_ids=[index % 2] * 12,
                sampling=SamplingParams(max_tokens=1),
                priority=-5,
            )
            core.add(prompt)
        core.step()
    decided = [
        plan.step for plan in core.runner.plans if any(name.startswith("a/") for name in plan.num_scheduled_tokens)
    ]
    assert decided == list(range(1, 12)), "two chunks of its prompt, then a token of each beam in every step"


def _never_copy(self: CacheManager, own: KindTable, num_computed: int) -> bool:
    return False


def test_a_planted_write_into_shared_blocks_is_detected(monkeypatch: pytest.MonkeyPatch, checking_runner: Make) -> None:
    monkeypatch.setattr(CacheManager, "_needs_copy", _never_copy)
    core = make_core(checking_runner)
    core.add(search_of(6, 4, 8))
    with pytest.raises((KVCacheError, AssertionError)):
        assert not +drain(core)[2]


def test_a_search_whose_beams_windows_do_not_fit_is_refused(checking_runner: Make) -> None:
    runner = checking_runner(64, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, (None, 9))
    runner.info = runner.info._replace(kind_blocks=(64, 16))
    core = EngineCore(EngineConfig(model="m", block_size=BLOCK_SIZE, eos_token_ids=EOS), runner)
    with pytest.raises(PagemillError, match="may need 20 KV blocks of 4 tokens; this engine has 16"):
        core.add(search_of(20, 4, 20))
    core.add(search_of(20, 3, 20))
    answers, _, errors = drain(core)
    assert answers
    assert not +errors
