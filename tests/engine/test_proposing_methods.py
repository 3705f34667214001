"""Methods are chosen by name, packages can add some, and what one tenant was answered is proposed to no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages import install_package

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.limits import scheduler_limits
from pagemill_engine.proposing import recent_answers
from pagemill_engine.proposing.recent_answers import RecentAnswers
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_engine.vllm_speculation import speculative_of
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.weights.errors import LoadError
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

Make = Callable[..., Any]
QUESTION = [*range(100, 140)]


class Tokens(NamedTuple):
    token_ids: list[int]
    num_prompt_tokens: int
    cache_root: bytes = b"tenant"
    predicted_token_ids: list[int] = []  # noqa: RUF012


def end(answers: RecentAnswers, prompt: list[int], answer: list[int], root: bytes = b"tenant") -> None:
    answers.end(Tokens([*prompt, *answer], len(prompt), root))


def proposed(answers: RecentAnswers, prompt: list[int], answer: list[int], root: bytes = b"tenant") -> list[int]:
    return answers.begin(Tokens([*prompt, *answer], len(prompt), root)).propose(4)


def test_an_answer_is_proposed_to_the_same_question_from_its_first_token() -> None:
    answers = RecentAnswers()
    assert proposed(answers, QUESTION, []) == []
    end(answers, QUESTION, [1, 2, 3, 4, 5, 6])
    assert proposed(answers, QUESTION, []) == [1, 2, 3, 4]
    assert proposed(answers, QUESTION, [1, 2, 3]) == [4, 5, 6], "nothing is proposed behind its end"
    assert proposed(answers, QUESTION, [7, 8]) == []
    assert proposed(answers, QUESTION, [7, 8, 2, 3, 4]) == [5, 6]
    end(answers, QUESTION, [1, 9, 9, 9])
    assert proposed(answers, QUESTION, []) == [1, 9, 9, 9], "of equal places the latest"


def test_nothing_of_another_tenant_or_another_beginning_is_proposed() -> None:
    answers = RecentAnswers()
    end(answers, QUESTION, [1, 2, 3, 4, 5, 6])
    assert proposed(answers, QUESTION, [], b"other") == []
    assert proposed(answers, [99, *QUESTION], []) == []
    assert proposed(answers, [*QUESTION, 7], [2, 3, 4]) == [5, 6], "prompts that begin alike share answers"


sizes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90)), max_size=60)


@given(sizes)
def test_the_answers_that_are_kept_are_bounded(each: list[tuple[int, int]]) -> None:
    answers = RecentAnswers()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recent_answers, "MOST_TOKENS", 300)
        patched.setattr(recent_answers, "MOST_OF_ONE", 100)
        for number, (beginning, size) in enumerate(each):
            end(answers, [beginning, *QUESTION], [number % 9] * size)
            kept = [len(texts.tokens) for texts in answers._answers.values()]
            assert sum(kept) == answers._num_tokens <= 300
            assert max(kept, default=0) <= 100
        if each and each[-1][1] > 3:
            assert next(reversed(answers._answers))[0] == each[-1][0], "the newest stays"


def serve(core: EngineCore, name: str, salt: str) -> tuple[list[int], int]:
    """Return the answer, and how many of its tokens were proposed."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, seed=3)
    core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=QUESTION, sampling=sampling, cache_salt=salt))
    answer, num_accepted = [], 0
    while core.has_work:
        for output in core.step().outputs:
            answer += output.token_ids
            num_accepted += output.num_accepted
        core.check_integrity()
    return answer, num_accepted


def an_engine(make: Make, **settings: Any) -> EngineCore:
    config = EngineConfig(model="m", overlap=False, **settings)
    core = EngineCore(config, make(64, 16, 256, 5000))
    core.step_time = StepTimeModel.from_params(StepTimeParams(knots_tokens=[1, 512], knot_ms=[10.0, 100.0]))
    return core


def test_a_repeated_request_is_proposed_its_answer_and_no_other_tenants(checking_runner: Make) -> None:
    core = an_engine(checking_runner, speculative=SpeculationConfig(method="ngram"))
    first, num_first = serve(core, "a", "one")
    other, num_other = serve(core, "b", "two")
    again, num_again = serve(core, "c", "one")
    assert first == other == again
    assert num_first == num_other == 0
    assert num_again > 30


@pytest.mark.parametrize(
    ("jumps_forward", "rounding_rows", "most"),
    [(True, (), 16), (True, (24,), 16), (True, (9, 24), 7), (False, (9,), 0)],
)
def test_tokens_that_a_form_forces_are_computed_with_the_bits_of_decodes(
    checking_runner: Make, jumps_forward: bool, rounding_rows: tuple[int, ...], most: int
) -> None:
    """So many at once, behind the one that was sampled: a step of 8 tokens rounds as one of 1, of 9 does not."""
    info = checking_runner(64, 16, 256, 5000).info._replace(jumps_forward=jumps_forward, rounding_rows=rounding_rows)
    assert scheduler_limits(EngineConfig(model="m"), info).most_jumped == most


@pytest.mark.parametrize("drafts", [False, True])
def test_the_default_copies_what_stood_before_where_no_layer_of_the_model_drafts(
    checking_runner: Make, drafts: bool
) -> None:
    runner = checking_runner(64, 16, 256, 5000)
    runner.info = runner.info._replace(drafts=drafts)
    core = EngineCore(EngineConfig(model="m"), runner)
    assert core._proposals is not None
    assert any(isinstance(method, RecentAnswers) for method, _ in core._proposals._methods) is not drafts


def test_what_decodes_sample_and_compute_is_published(checking_runner: Make) -> None:
    core = an_engine(checking_runner, speculative=SpeculationConfig(method="ngram"))
    serve(core, "a", "")
    assert core._proposals is not None
    assert core._proposals.per_decode == (1.0, 1.0, 0.0)
    for name in "bcdefgh":
        serve(core, name, "")
    sampled, computed, draft_ms = core._proposals.per_decode
    assert 1.1 < sampled <= computed < 9.0
    assert draft_ms == 0.0
    params = core._step_time_due() or core.step_time.params(*core._proposals.per_decode)
    assert (params.tokens_per_decode, params.computed_per_decode) == (sampled, computed)
    assert StepTimeModel.from_params(params).tokens_per_decode == sampled


def test_what_decodes_sample_is_that_of_steps_that_run_ahead_without_proposals_too(checking_runner: Make) -> None:
    proposals = Proposals([])
    core = EngineCore(EngineConfig(model="m", overlap=True), checking_runner(64, 16, 256, 5000), proposals=proposals)
    proposals.per_decode = 4.0, 5.0, 0.0
    for name in "abcd":
        serve(core, name, "")
    assert proposals.per_decode[0] < 3.0


def test_requests_share_no_answers_where_they_share_no_prefixes(checking_runner: Make) -> None:
    settings = SpeculationConfig(method="ngram")
    core = an_engine(checking_runner, speculative=settings, enable_prefix_caching=False)
    assert [serve(core, name, "")[1] for name in "ab"] == [0, 0]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "speed-up-by-speculation.md"


def test_a_package_can_add_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checking_runner: Make) -> None:
    (code,) = re.findall(r"## Add a method.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    entries = "countdown = countdown:Countdown", "broken = countdown:nothing", "half = countdown:Falling.propose"
    install_package(tmp_path, monkeypatch, "countdown", code, "pagemill.proposers", *entries)
    for name in ("broken", "half"):
        with pytest.raises(LoadError, match=f"method` {name} is registered as countdown"):
            an_engine(checking_runner, speculative=SpeculationConfig(method=name))
    core = an_engine(checking_runner, speculative=speculative_of({"method": "countdown", "num_speculative_tokens": 3}))
    assert len(serve(core, "a", "")[0]) == 40
    proposed = [tokens for plan in core.runner.plans for tokens in plan.proposals.values()]
    assert proposed
    assert all(tokens == [*range(tokens[0], tokens[0] - len(tokens), -1)] for tokens in proposed)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no method 'unknown'; there are auto, ngram, "):
        SpeculationConfig(method="unknown")


@pytest.mark.parametrize(
    ("settings", "info", "match"),
    [
        ({"method": "ngram", "num_tokens": 16}, {}, "num_tokens is 16, but a step has 16 tokens"),
        ({"method": "auto", "num_tokens": 16}, {}, "num_tokens is 16"),
        ({"method": "ngram"}, {"most_proposed": 0}, "keeps states without room for such tokens; set it to off"),
    ],
)
def test_proposals_that_cannot_be_verified_are_refused_before_ready(
    checking_runner: Make, settings: dict[str, Any], info: dict[str, Any], match: str
) -> None:
    runner = checking_runner(64, 16, 256, 50)
    runner.info = runner.info._replace(**info)
    config = EngineConfig(model="m", speculative=SpeculationConfig(**settings), max_num_batched_tokens=16)
    with pytest.raises(LoadError, match=match):
        EngineCore(config, runner)


def test_the_default_leaves_such_engines_without_proposals(checking_runner: Make) -> None:
    runner = checking_runner(64, 16, 256, 50)
    runner.info = runner.info._replace(most_proposed=0)
    assert EngineCore(EngineConfig(model="m"), runner)._proposals is None
    small = EngineConfig(model="m", max_num_batched_tokens=4)
    assert EngineCore(small, checking_runner(64, 16, 256, 50))._proposals is not None
