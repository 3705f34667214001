"""Recurrent layers beside attention: whatever the scheduler does, every output is that of a plain recurrence.

The device (`recurrent_rows`) computes each token from a row's state and the log since, as plans say, and refuses a plan
whose states it cannot have. The answers are compared with those of an engine without states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from oracle_proposer import oracle
from recurrent_rows import RecurrentFault, RecurrentRows
from step_workloads import BLOCK_SIZE, MAX_MODEL_LEN, a_config, a_request

from pagemill_engine.config import EngineConfig
from pagemill_engine.kv import states
from pagemill_engine.kv.states import States
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.step import StepPlan
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

Make = Callable[..., Any]


def serve(
    core: EngineCore, queue: Sequence[GenerateRequest], stagger: int = 99, abort: Callable[[], str | None] | None = None
) -> dict[tuple[str, int], list[int]]:
    """Serve the requests, `stagger` more in each step, and return the tokens by request and choice."""
    found: dict[tuple[str, int], list[int]] = {}
    left = list(queue)
    while left or core.has_work:
        for request in left[:stagger]:
            try:
                core.add(request)
            except PagemillError as error:
                found[request.request_id, -1] = [hash(error.code)]
        del left[:stagger]
        if abort is not None and (name := abort()):
            core.abort(name)
        for output in core.step().outputs:
            found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
        core.check_integrity()
    return found


def workload(number: int) -> list[GenerateRequest]:
    draw = random.Random(number)
    shared = [draw.randint(0, 1) for _ in range(24)]
    return [a_request(draw, index, shared) for index in range(draw.randint(1, 9))]


def run(
    make: Make, number: int, overlap: bool, num_states: int, proposals: Proposals | None = None, **kinds: Any
) -> tuple[dict[tuple[str, int], list[int]], Any]:
    draw = random.Random(number)
    runner = make(draw.randint(16, 40), BLOCK_SIZE, MAX_MODEL_LEN, 11, num_states=num_states, **kinds)
    core = EngineCore(a_config(draw, overlap), runner, clock=lambda: 0.0, proposals=proposals)
    found = serve(core, workload(number), draw.randint(1, 9))
    usage = core.scheduler.kv.usage()
    assert all(each.num_active == 0 for each in usage), "a block was leaked"
    return found, runner


@pytest.mark.slow_for("2-0-True", "4-0-False")
@pytest.mark.sample("2-0-True", "4-0-False", "3-5000-*", "9-300-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_states", "state_bytes"), [(2, 0), (4, 0), (40, 0), (3, 5000), (9, 300)])
def test_answers_are_those_of_an_engine_without_states(
    checking_runner: Make, overlap: bool, num_states: int, state_bytes: int
) -> None:
    """Beams, choices, reports, priorities, preemptions and prefix hits, down to a budget of two sequences, with memory
    that stays with its kind or moves."""
    num_checked = num_moved = 0
    for number in range(16 if state_bytes else 40):
        plain, _ = run(checking_runner, number, overlap, 0)
        found, runner = run(checking_runner, number, overlap, num_states, state_bytes=state_bytes)
        refused = {name for name, choice in found if choice < 0}  # searches with more beams than states
        answers = {key: tokens for key, tokens in plain.items() if key[0] not in refused}
        assert {key: found[key] for key in answers} == answers, f"workload {number} has other tokens"
        assert num_states < 8 or state_bytes or len(answers) == len(plain)
        num_checked += runner.recurrent.num_checked
        num_moved += sum(len(changes.copies) for plan in runner.plans for changes in plan.tables[1:])
    assert num_checked > 800
    assert (num_moved > 0) == (state_bytes > 0), "states are copied only where memory moves"


@pytest.mark.slow_for("(None, 9)", "(5,)")
@pytest.mark.parametrize("windows", [(None, 9), (5,), ()], ids=str)
def test_answers_are_the_same_beside_windows_and_without_attention(checking_runner: Make, windows: Any) -> None:
    for number in range(25):
        plain, _ = run(checking_runner, number, True, 0)
        found, _ = run(checking_runner, number, True, 16 if windows else 40, windows=windows)
        assert found == plain, f"workload {number} has other tokens"


@pytest.mark.slow_for("False")
@pytest.mark.parametrize("overlap", [False, True])
def test_proposed_tokens_are_in_no_state(checking_runner: Make, overlap: bool) -> None:
    num_proposed = 0
    for number in range(30):
        plain, _ = run(checking_runner, number, overlap, 0)
        prompts = {request.request_id: request.prompt_token_ids for request in workload(number)}
        texts = [prompts[name] + answer for (name, choice), answer in plain.items() if choice >= 0]
        proposals = Proposals([oracle(texts, random.Random(number), 0.3, 11)], 5)
        found, runner = run(checking_runner, number, overlap, 8, proposals)
        assert found == plain, f"workload {number} has other tokens"
        num_proposed += sum(len(each) for plan in runner.plans for each in plan.proposals.values())
    assert num_proposed > 100


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_read_that_a_failed_step_did_not_move(checking_runner: Make, overlap: bool) -> None:
    num_failed = 0
    for number in range(12):
        plain, _ = run(checking_runner, number, overlap, 0)
        draw = random.Random(number)
        runner = checking_runner(draw.randint(16, 40), BLOCK_SIZE, MAX_MODEL_LEN, 11, num_states=4, state_bytes=2000)
        core = EngineCore(a_config(draw, overlap), runner, clock=lambda: 0.0)
        moving: list[int] = []

        def fails(plan: StepPlan, moving: list[int] = moving) -> bool:
            if moving or not plan.tables[1].copies or len(plan.num_scheduled_tokens) == 1:
                return False
            moving.append(plan.step)
            return True

        runner.raise_early = fails
        found = serve(core, workload(number), draw.randint(1, 9))
        num_failed += len(moving)
        for (name, choice), tokens in found.items():
            if choice >= 0:
                assert tokens == plain[name, choice], f"workload {number}: {name} has other tokens"
    assert num_failed > 3


@pytest.mark.slow_for("2000-False")
@pytest.mark.sample("0-True", "2000-False")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state_bytes", [0, 2000])
def test_failed_rows_and_steps_spoil_no_state(checking_runner: Make, overlap: bool, state_bytes: int) -> None:
    for number in range(30):
        plain, _ = run(checking_runner, number, overlap, 0)
        draw = random.Random(number)
        num_states = 4 if state_bytes else 8
        num_blocks = draw.randint(16, 40)
        runner = checking_runner(
            num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, 11, num_states=num_states, state_bytes=state_bytes
        )
        core = EngineCore(a_config(draw, overlap), runner, clock=lambda: 0.0)
        if number % 2:
            runner.fail_rows = lambda plan: {
                name: "not finite" for name in plan.num_scheduled_tokens if name == "r1/0" and plan.step % 3 == 0
            }
        else:
            runner.raise_on = lambda plan: "r2/0" in plan.num_scheduled_tokens
        found = serve(core, workload(number), draw.randint(1, 9))
        spoiled = "r1" if number % 2 else "r2"
        for (name, choice), tokens in found.items():
            if name != spoiled and choice >= 0:
                assert tokens == plain[name, choice], f"workload {number}: {name} has other tokens"


def a_core(make: Make, num_states: int = 16, **options: Any) -> tuple[EngineCore, Any]:
    runner = make(200, BLOCK_SIZE, 600, 11, num_states=num_states)
    config = EngineConfig(model="m", block_size=BLOCK_SIZE, eos_token_ids=[10], **options)
    return EngineCore(config, runner, clock=lambda: 0.0), runner


def ask(name: str, prompt: list[int], max_tokens: int = 4, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **sampling)
    return GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=params)


def computed(runner: Any, name: str) -> int:
    """Return the tokens that steps have computed for a request."""
    return sum(count for plan in runner.plans for each, count in plan.num_scheduled_tokens.items() if each == name)


def test_the_next_turn_of_a_conversation_resumes_at_its_end(checking_runner: Make) -> None:
    core, runner = a_core(checking_runner)
    prompt = [number % 7 for number in range(42)]
    answer = serve(core, [ask("first", prompt, 9)])["first", 0]
    serve(core, [ask("second", [*prompt, *answer, 1, 2, 3])])
    assert computed(runner, "second/0") == 42 + 9 + 3 - 48 + 3, "48 of 50 computed tokens are whole blocks"


def test_a_beginning_that_two_requests_share_is_computed_twice_and_then_resumed(checking_runner: Make) -> None:
    core, runner = a_core(checking_runner)
    shared = [number % 5 for number in range(80)]
    for number in range(3):
        serve(core, [ask(f"r{number}", [*shared, 7, number, 9])])
    assert [computed(runner, f"r{number}/0") for number in range(3)] == [86, 86, 6]


def test_a_beginning_that_a_request_names_is_computed_once(checking_runner: Make) -> None:
    """Even by a burst, and in a prompt of several steps; points that are no tokens of the prompt do not count."""
    shared = [number % 5 for number in range(120)]
    for at_once in (False, True):
        core, runner = a_core(checking_runner, max_num_seqs=12, max_num_batched_tokens=50)
        queue = [
            msgspec.structs.replace(ask(f"r{number}", [*shared, 7, number, 9]), reuse_points=[-7, 122, 10_000])
            for number in range(10)
        ]
        for request in [] if at_once else queue:
            serve(core, [request])
        if at_once:
            serve(core, queue)
        assert [computed(runner, f"r{number}/0") for number in range(10)] == [126, *[6] * 9]


def test_a_long_prompt_keeps_a_state_every_so_many_tokens(
    checking_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that shares a part of it resumes behind the last of them, at its first use."""
    monkeypatch.setattr(states, "MIN_POINT_TOKENS", 32)
    core, runner = a_core(checking_runner)
    prompt = [number % 7 for number in range(150)]
    for name, num_shared in (("first", 150), ("second", 105), ("third", 65)):
        serve(core, [ask(name, [*prompt[:num_shared], 8, 9])])
    assert [computed(runner, f"{name}/0") - 5 for name in ("first", "second", "third")] == [150, 105 - 96, 65 - 64]


def test_a_burst_of_one_beginning_waits_for_its_state(checking_runner: Make) -> None:
    """The second request sees that the first shares its beginning; all others resume behind the state it writes."""
    core, runner = a_core(checking_runner, max_num_seqs=12)
    shared = [number % 5 for number in range(120)]
    serve(core, [ask(f"r{number}", [*shared, 7, number, 9]) for number in range(10)])
    tokens = [computed(runner, f"r{number}/0") for number in range(10)]
    assert tokens == [126, 126, *[6] * 8]
    assert runner.plans[0].num_scheduled_tokens.keys() == {"r0/0", "r1/0"}


def test_choices_resume_at_the_last_boundary_of_their_prompt(checking_runner: Make) -> None:
    for caching in (True, False):
        core, runner = a_core(checking_runner, enable_prefix_caching=caching)
        serve(core, [ask("r", [number % 5 for number in range(51)], n=3)])
        assert [computed(runner, f"r/{choice}") for choice in range(3)] == [54, 51 - 48 + 3, 51 - 48 + 3]


def test_a_preempted_request_resumes_at_its_last_boundary(checking_runner: Make) -> None:
    core, runner = a_core(checking_runner)
    core.add(ask("r", [number % 5 for number in range(50)], 20))
    for _ in range(8):
        core.step()
    sequence = core.scheduler._sequences.by_id["r/0"]
    core.scheduler._preempt(sequence)
    serve(core, [])
    assert computed(runner, "r/0") == 50 + 19 + 57 % BLOCK_SIZE


def test_rows_wait_where_no_state_can_be_had_and_none_is_lost(checking_runner: Make) -> None:
    """Two sequences share a beginning and have two states: one of them must wait until the other has its own."""
    core, runner = a_core(checking_runner, num_states=2, max_num_seqs=4, overlap=True)
    shared = [number % 5 for number in range(40)]
    queue = [ask(f"r{number}", [*shared, number], 30) for number in range(4)]
    found = serve(core, queue)
    assert all(len(tokens) == 30 for tokens in found.values())
    assert core.scheduler.num_preemptions == 0
    assert max(len(plan.num_scheduled_tokens) for plan in runner.plans) == 2


@pytest.mark.parametrize("fault", ["late", "in place", "not released"])
def test_a_planted_fault_is_seen_by_the_device(
    checking_runner: Make, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, withdraw = States.fold, RecurrentRows.withdraw
    if fault == "late":
        monkeypatch.setattr(States, "fold", lambda self, own, end, sequence: fold(self, own, end - 1, sequence))
    elif fault == "in place":
        monkeypatch.setattr(States, "lacks_own", lambda self, own: not own.folds)
    else:
        monkeypatch.setattr(RecurrentRows, "withdraw", lambda self, name, num: withdraw(self, name, max(0, num - 1)))
    holds: Callable[[], None] = partial(
        test_answers_are_those_of_an_engine_without_states, checking_runner, False, 4, 0
    )
    if fault == "not released":
        holds = partial(test_proposed_tokens_are_in_no_state, checking_runner, False)
    with pytest.raises((AssertionError, RecurrentFault, RuntimeError)):
        holds()
