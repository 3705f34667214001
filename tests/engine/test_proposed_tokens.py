"""Proposed tokens change how many steps an answer takes, and nothing else.

The proposer here knows the answers and plants errors at random places. Every workload is served with it and without,
by both loops; the device compares all that a row reads with the digests of its own tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from oracle_proposer import Made, oracle
from step_workloads import BLOCK_SIZE, MAX_MODEL_LEN, a_config, a_request

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.step import StepPlan
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.slow

Make = Callable[..., Any]


def requests(number: int) -> list[GenerateRequest]:
    draw = random.Random(number)
    shared = [draw.randint(0, 1) for _ in range(24)]
    return [a_request(draw, index, shared) for index in range(draw.randint(1, 9))]


def serve(
    make: Make, number: int, overlap: bool, proposals: Proposals | None
) -> tuple[dict[tuple[str, int], Any], Any]:
    """Serve workload `number` to its end; return what each client got by request and choice, and the runner."""
    draw = random.Random(number)
    runner = make(draw.randint(16, 40), BLOCK_SIZE, MAX_MODEL_LEN, 11)
    config = a_config(draw, overlap)
    queue, stagger = requests(number), draw.randint(1, 9)
    core = EngineCore(config, runner, clock=lambda: 0.0, proposals=proposals)
    found: dict[tuple[str, int], Any] = {}
    while queue or core.has_work:
        for request in queue[:stagger]:
            try:
                core.add(request)
            except PagemillError as error:
                found[request.request_id, -1] = error.code
        del queue[:stagger]
        for output in core.step().outputs:
            add(found.setdefault((output.request_id, output.choice), {}), output)
        core.check_integrity()
    return found, runner


def add(answer: dict[str, Any], output: TokensOut) -> None:
    assert answer.get("finish_reason") is None, "nothing follows the end"
    answer.setdefault("token_ids", []).extend(output.token_ids)
    answer.setdefault("logprobs", []).extend(output.logprobs or ())
    answer.setdefault("prompt_logprobs", []).extend(output.prompt_logprobs)
    answer["finish_reason"] = output.finish_reason


def texts_of(number: int, found: dict[tuple[str, int], Any]) -> list[list[int]]:
    """Return the prompt and the answer of each choice of a workload."""
    prompts = {request.request_id: request.prompt_token_ids for request in requests(number)}
    return [prompts[name] + answer["token_ids"] for (name, choice), answer in found.items() if choice >= 0]


def num_proposed(make: Make, numbers: range, overlap: bool, error_rate: float) -> int:
    """Serve workloads with and without proposals; the answers must be equal. Return the number of proposed tokens."""
    total = 0
    for number in numbers:
        plain, _ = serve(make, number, overlap, None)
        proposals = Proposals([oracle(texts_of(number, plain), random.Random(number), error_rate, 11)], 5)
        found, runner = serve(make, number, overlap, proposals)
        assert found == plain, f"workload {number} has other tokens"
        total += sum(len(tokens) for plan in runner.plans for tokens in plan.proposals.values())
    return total


@pytest.mark.sample("0.0-False", "0.2-*", "1.0-False")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error_rate", [0.0, 0.2, 1.0])
def test_answers_with_proposed_tokens_are_those_without(
    checking_runner: Make, overlap: bool, error_rate: float
) -> None:
    assert num_proposed(checking_runner, range(60), overlap, error_rate) > 500


@pytest.mark.parametrize("windows", [(5,), (None, 5), (None, 9, 4)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_behind_windows_are_dropped_by_tokens_that_were_sampled(
    checking_runner: Make, windows: tuple[int | None, ...], overlap: bool
) -> None:
    """A block that only rejected tokens would leave behind is still read."""
    make = partial(checking_runner, windows=windows)
    assert num_proposed(make, range(100, 130), overlap, 0.3) > 200


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_answer_what_they_do_without_proposed_tokens(checking_runner: Make, stages: int) -> None:
    """While requests are preempted, fork and end with several steps in flight."""
    assert num_proposed(partial(checking_runner, stages=stages), range(200, 230), True, 0.2) > 300


class Following:
    """Proposes as many tokens as it may: the right ones, or ones that are never sampled."""

    agreement = 0

    def __init__(self, token_ids: list[int], text: list[int], *, right: bool) -> None:
        self.token_ids, self.text, self.right = token_ids, text, right

    def propose(self, most: int) -> list[int]:
        tokens = self.text[len(self.token_ids) :][:most]
        return tokens if self.right else [token + 1 for token in tokens]


def a_text(checking_runner: Make) -> tuple[GenerateRequest, list[int]]:
    sampling = SamplingParams(max_tokens=41, ignore_eos=True, seed=3)
    request = GenerateRequest(request_id="r", model="m", prompt_token_ids=[1, 2, 3], sampling=sampling)
    core = EngineCore(EngineConfig(model="m", block_size=4, overlap=False), checking_runner())
    core.add(request)
    text = list(request.prompt_token_ids)
    while core.has_work:
        text += [token_id for output in core.step().outputs for token_id in output.token_ids]
    return request, text


def num_steps(checking_runner: Make, *, right: bool, overlap: bool, stages: int) -> int:
    request, text = a_text(checking_runner)
    proposals = Proposals([Made(lambda token_ids: Following(token_ids, text, right=right))], 4)
    runner = checking_runner(stages=stages)
    core = EngineCore(EngineConfig(model="m", block_size=4, overlap=overlap), runner, proposals=proposals)
    core.add(request)
    while core.has_work:
        core.step()
    return core.num_steps


@pytest.mark.parametrize(("overlap", "stages"), [(False, 1), (True, 1), (True, 2)])
def test_the_number_of_steps_is_what_acceptance_says(checking_runner: Make, overlap: bool, stages: int) -> None:
    """One step samples the first of 41 tokens behind the prompt. With four proposals that are right, each further step
    brings five. The overlapped loop waits for each of them, and not for more."""
    assert num_steps(checking_runner, right=True, overlap=overlap, stages=stages) == 1 + 40 // 5
    assert num_steps(checking_runner, right=False, overlap=overlap, stages=stages) == 41


def test_stages_verify_tokens_at_once_each_as_many_as_its_own_step_has_time_for(checking_runner: Make) -> None:
    """Six answers decode in two stages: three in each step, which takes no longer up to 16 tokens."""
    request, text = a_text(checking_runner)
    proposals = Proposals(
        [Made(lambda token_ids: Following(token_ids, text, right=True))],
        4,
        ms_of=lambda num_tokens, _: 10.0 if num_tokens <= 16 else 1000.0,
    )
    core = EngineCore(
        EngineConfig(model="m", block_size=4, overlap=True), checking_runner(stages=2), proposals=proposals
    )
    schedule, verified = core.scheduler.schedule, []

    def noted() -> StepPlan:
        before = [len(step.plan.proposals) for step in core.scheduler._in_flight]
        plan = schedule()
        verified.append((before, [len(tokens) for tokens in plan.proposals.values()]))
        return plan

    core.scheduler.schedule = noted  # type: ignore[method-assign]
    for number in range(6):
        core.add(msgspec.structs.replace(request, request_id=f"r{number}"))
    while core.has_work:
        core.step()
    assert ([3], [4, 4, 4]) in verified


def test_a_proposal_without_blocks_or_budget_is_not_made(checking_runner: Make) -> None:
    """Requests that wait for blocks, and decodes of others, come first."""
    request, text = a_text(checking_runner)
    runner = checking_runner(num_blocks=14)
    proposals = Proposals([Made(lambda token_ids: Following(token_ids, text, right=True))], 8)
    core = EngineCore(EngineConfig(model="m", block_size=4, overlap=False), runner, proposals=proposals)
    core.add(request)
    while core.has_work:
        core.step()
        core.check_integrity()
    assert core.scheduler.num_preemptions == 0
    assert max(len(tokens) for plan in runner.plans for tokens in plan.proposals.values()) == 8


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_wrong_withdrawal_is_found(checking_runner: Make, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """A rejected token that stays counted is seen by the integrity check, and one too few by the device."""
    sound = CacheManager.withdraw
    monkeypatch.setattr(CacheManager, "withdraw", lambda self, seq, num: sound(self, seq, max(0, num + wrong)))
    with pytest.raises(Exception, match=r"KV|tokens|samples|withdrawn"):
        num_proposed(checking_runner, range(20), False, 0.3)


def test_a_token_behind_an_end_is_found(checking_runner: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers end by stop tokens and by their length within the tokens of one step."""
    sound = Scheduler._take_verified

    def take(self: Scheduler, seq: Any, num_tokens: int, num_proposed: int, token_ids: list[int], *rest: Any) -> None:
        sound(self, seq, num_tokens, num_proposed, token_ids, *rest)
        if seq.request_id not in self._sequences.by_id and self._sequences.outputs._outputs:
            self._sequences.outputs._outputs[-1].token_ids.append(token_ids[-1])

    monkeypatch.setattr(Scheduler, "_take_verified", take)
    with pytest.raises(AssertionError, match="has other tokens"):
        num_proposed(checking_runner, range(20), False, 0.0)
