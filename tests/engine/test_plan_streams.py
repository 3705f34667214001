"""Of models with one cache kind, the plans of 200 workloads are those that were recorded before caches had kinds.

A workload is drawn from its number. Its line in `plan_streams.txt` has one digest per loop, over all plans, the answers
and the reported prefixes. Regenerate a line only if a change of the schedule is wanted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from step_workloads import BLOCK_SIZE, MAX_MODEL_LEN, a_config, a_request

from pagemill_engine.loop.core import EngineCore
from pagemill_execution.step import (
    AdmittedSequence,
    HeldBlocks,
    PromptTargets,
    StepPlan,
    TableChanges,
    decode_plan,
    encode_plan,
)
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams

pytestmark = pytest.mark.slow

NUM_WORKLOADS = 200
RECORDED = Path(__file__).with_name("plan_streams.txt")
Make = Callable[..., Any]


def canonical(plan: StepPlan) -> tuple[Any, ...]:
    """Return what a plan of one kind says to a runner, without the names of its fields."""
    return (
        plan.step,
        list(plan.num_scheduled_tokens.items()),
        [
            (
                each.request_id,
                each.token_ids,
                each.num_prompt_tokens,
                each.num_computed_tokens,
                each.tables[0].block_ids,
                each.seed,
                each.choice,
                each.eos_token_ids,
            )
            for each in plan.admitted
        ],
        list(plan.tables[0].appended.items()),
        plan.tables[0].placed,
        plan.tables[0].copies,
        plan.released,
        sorted(plan.samples),
        [(name, each.first, each.offset, each.token_ids, each.num_top) for name, each in plan.prompt_targets.items()],
        plan.decode_context_tokens,
        plan.chunk_context_products,
    )


def digest_of(make: Make, number: int, overlap: bool) -> str:
    """Serve workload `number` to its end and return the digest of its plans, answers and prefixes."""
    draw = random.Random(number)
    runner = make(draw.randint(12, 40), BLOCK_SIZE, MAX_MODEL_LEN, 11)
    core = EngineCore(
        a_config(draw, overlap),
        runner,
        clock=lambda: 0.1 * len(runner.plans),
    )
    if draw.random() < 0.2:
        runner.fail_rows = lambda plan: {
            name: "not finite" for name in plan.num_scheduled_tokens if name == "r1/0" and plan.step % 5 == 0
        }
    if draw.random() < 0.1:
        runner.raise_on = lambda plan: "r2/0" in plan.num_scheduled_tokens
    shared = [draw.randint(0, 1) for _ in range(24)]
    queue = [a_request(draw, index, shared) for index in range(draw.randint(1, 9))]
    aborts = draw.random() < 0.3
    stagger = draw.randint(1, 9)
    seen = hashlib.blake2b(digest_size=8)
    while queue or core.has_work:
        for request in queue[:stagger]:
            try:
                core.add(request)
            except PagemillError as error:
                seen.update(str(error.code).encode())
        del queue[:stagger]
        if aborts and draw.random() < 0.1:
            core.abort(f"r{draw.randint(0, 8)}")
        outputs = core.step()
        core.check_integrity()
        answers = sorted((each.request_id, each.choice, each.token_ids) for each in outputs.outputs)
        seen.update(repr(answers).encode())
        if outputs.prefixes is not None:
            seen.update(repr((sorted(outputs.prefixes.added), sorted(outputs.prefixes.removed))).encode())
    seen.update(repr([canonical(plan) for plan in runner.plans]).encode())
    return seen.hexdigest()


def plans_of(make: Make, numbers: Iterable[int]) -> list[StepPlan]:
    """Return all plans of the workloads in the overlapped loop."""
    runners = []

    def noted(*sizes: int) -> Any:
        runners.append(make(*sizes))
        return runners[-1]

    for number in numbers:
        digest_of(noted, number, overlap=True)
    return [plan for runner in runners for plan in runner.plans]


def recorded(number: int) -> list[str]:
    return RECORDED.read_text(encoding="ascii").splitlines()[number].split()


@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, 50))
def test_plans_of_one_kind_are_those_that_were_recorded(checking_runner: Make, first: int) -> None:
    for number in range(first, first + 50):
        found = [digest_of(checking_runner, number, overlap) for overlap in (False, True)]
        assert found == recorded(number), f"workload {number}"


def test_the_workloads_cover_what_plans_can_contain(checking_runner: Make) -> None:
    """Without copies, preemptions or prefix hits among them, equal digests would say little."""
    plans = plans_of(checking_runner, range(40))
    assert any(plan.tables[0].copies for plan in plans)
    assert any(plan.tables[0].placed for plan in plans)
    assert any(plan.prompt_targets for plan in plans)
    assert any(plan.tables[0].appended for plan in plans)
    assert any(each.num_computed_tokens for plan in plans for each in plan.admitted)
    assert any(each.request_id in plan.released for plan in plans for each in plan.admitted), "nothing starts over"


def test_a_process_that_follows_gets_the_same_plan_with_the_names_of_masks(checking_runner: Make) -> None:
    for plan in plans_of(checking_runner, range(40)):
        plan.token_masks = {"a/0": object()}
        followed = decode_plan(encode_plan(plan))
        assert plan.token_masks, "the plan itself keeps its masks"
        plan.token_masks = {"a/0": None}
        assert followed == plan


def a_plan(draw: random.Random) -> StepPlan:
    """Return a plan of up to 64 requests and three kinds, with anything that a plan can have."""
    names = [f"r{number}/{draw.randint(0, 3)}" for number in range(draw.choice([0, 1, 2, 9, 64]))]

    def some() -> list[str]:
        return [name for name in names if draw.random() < 0.4]

    def numbers() -> list[int]:
        return [draw.randrange(1 << 31) for _ in range(draw.randint(0, 5))]

    def admitted(name: str) -> AdmittedSequence:
        tables = [HeldBlocks(draw.randint(0, 99), [draw.randint(-1, 9999), *numbers()]) for _ in range(3)]
        return AdmittedSequence(
            request_id=name,
            token_ids=numbers(),
            num_prompt_tokens=draw.randint(1, 99),
            num_computed_tokens=draw.randint(0, 99),
            tables=tables[: draw.randint(1, 3)],
            sampling=SamplingParams(temperature=draw.random(), logprobs=draw.choice([None, 3]), stop=["\n", "é"]),
            choice=draw.randint(0, 3),
            seed=draw.randrange(-(1 << 63), 1 << 63),
            pooling=draw.choice([None, PoolingParams()]),
            eos_token_ids=numbers(),
            adapter_digest=draw.choice(["", "digest"]),
        )

    def changes() -> TableChanges:
        entries = [(name, draw.randint(0, 9), draw.randint(0, 999)) for name in some()]
        appended = {name: numbers() for name in some()}
        return TableChanges(appended, entries, entries[:2], [(1, 2), (3, draw.randint(4, 9))])

    return StepPlan(
        step=draw.randrange(1 << 40),
        num_scheduled_tokens={name: draw.randint(1, 8192) for name in names},
        admitted=[admitted(name) for name in some()],
        tables=[changes() for _ in range(draw.randint(0, 3))],
        released=some(),
        samples=set(some()),
        proposals={name: numbers() for name in some()},
        drafts={name: draw.randint(1, 9) for name in some()},
        prompt_targets={name: PromptTargets(1, draw.randint(0, 9), numbers(), 2) for name in some()},
        decode_context_tokens=draw.randrange(1 << 50),
        chunk_context_products=draw.randrange(1 << 50),
    )


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.slow])])
def test_any_plan_arrives_as_it_was_sent(count: int) -> None:
    draw = random.Random(count)
    for _ in range(count):
        plan = a_plan(draw)
        data = encode_plan(plan)
        assert decode_plan(data) == plan
        assert encode_plan(decode_plan(data)) == data or plan.samples, "a set has no order"


def test_the_plans_that_are_drawn_have_all_that_a_plan_can_have() -> None:
    """A field that is added and not drawn would not be seen to arrive."""
    draw = random.Random(1)
    plans = [a_plan(draw) for _ in range(40)]
    for field in StepPlan.__struct_fields__:
        assert field == "token_masks" or any(getattr(plan, field) for plan in plans), field
    changes = [each for plan in plans for each in plan.tables]
    assert all(any(getattr(each, field) for each in changes) for field in TableChanges.__struct_fields__)
    sequences = [each for plan in plans for each in plan.admitted]
    assert all(any(getattr(each, field) for each in sequences) for field in AdmittedSequence.__struct_fields__)
