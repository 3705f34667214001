"""Prompts share the prefixes that the workload declares, and turns wait for the answers before them."""

from __future__ import annotations

from pagemill_simulator.fleet.conversations import Conversations
from pagemill_simulator.workloads.request import SimRequest

VOCAB_SIZE = 100


def conversations(*requests: SimRequest) -> Conversations:
    return Conversations(requests, VOCAB_SIZE)


def test_prompts_without_a_session_share_no_prefix() -> None:
    talks = conversations(*(SimRequest(0.0, 5, 1) for _ in range(300)))
    prompts = [talks.prompt(index) for index in range(300)]
    assert {len(prompt) for prompt in prompts} == {5}
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 300
    assert all(0 <= token < VOCAB_SIZE for prompt in prompts for token in prompt)


def test_the_shortest_prompt_has_one_token() -> None:
    assert len(conversations(SimRequest(0.0, 0, 1)).prompt(0)) == 1


def test_a_turn_begins_with_the_whole_conversation() -> None:
    talks = conversations(SimRequest(0.0, 6, 3, session=4), SimRequest(1.0, 20, 1, session=4))
    first = talks.prompt(0)
    assert talks.arrives(0)
    assert talks.ended(0, first, [50, 51, 52]) is None
    second = talks.prompt(1)
    assert second[:9] == [*first, 50, 51, 52]
    assert len(second) == 20


def test_a_turn_shorter_than_the_conversation_is_its_beginning() -> None:
    talks = conversations(SimRequest(0.0, 6, 3, session=4), SimRequest(1.0, 7, 1, session=4))
    first = talks.prompt(0)
    talks.arrives(0)
    talks.ended(0, first, [50, 51, 52])
    assert talks.prompt(1) == [*first, 50]


def test_turns_wait_for_their_answers_in_order() -> None:
    talks = conversations(*(SimRequest(0.0, 4, 1, session=1) for _ in range(3)), SimRequest(0.0, 4, 1, session=2))
    assert [talks.arrives(index) for index in range(4)] == [True, False, False, True]
    assert talks.ended(0, [1], [2]) == 1
    assert talks.ended(1, [1], [2]) == 2
    assert talks.ended(2, [1], [2]) is None


def test_a_turn_that_arrives_after_the_answer_does_not_wait() -> None:
    talks = conversations(SimRequest(0.0, 4, 1, session=1), SimRequest(9.0, 4, 1, session=1))
    assert talks.arrives(0)
    assert talks.ended(0, [1], [2]) is None
    assert talks.arrives(1)


def test_a_turn_of_own_tokens_ends_with_them() -> None:
    system, first = [90, 91, 92], [80, 81]
    talks = conversations(
        SimRequest(0.0, 5, 2, session=1, token_ids=[*system, *first]),
        SimRequest(0.0, 9, 1, session=1, token_ids=[70, 71]),
        SimRequest(0.0, 5, 1, session=2, token_ids=[*system, 60, 61]),
    )
    prompt = talks.prompt(0)
    assert prompt == [*system, *first]
    talks.arrives(0)
    talks.ended(0, prompt, [50, 51])
    assert talks.prompt(1) == [*prompt, 50, 51, 70, 71]
    assert talks.prompt(2) == [*system, 60, 61]
