"""A client's prediction is followed from its beginning, and again behind a difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.proposing.prediction import PredictionProposer

PROMPT = [90, 91]
PREDICTED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def proposed(answer: list[int], most: int = 4, predicted: list[int] = PREDICTED) -> list[int]:
    return PredictionProposer([*PROMPT, *answer], len(PROMPT), predicted).propose(most)


def test_a_prediction_is_followed_from_its_beginning() -> None:
    assert proposed([]) == [1, 2, 3, 4]
    assert proposed([1, 2]) == [3, 4, 5, 6]
    assert proposed(PREDICTED[:8]) == [9, 10], "nothing is proposed behind its end"
    assert proposed(PREDICTED) == []


def test_it_is_found_again_behind_a_difference() -> None:
    assert proposed([1, 2, 77]) == []
    assert proposed([1, 2, 77, 78, 4, 5]) == [], "two tokens are common in any text"
    assert proposed([1, 2, 77, 78, 4, 5, 6]) == [7, 8, 9, 10]
    assert proposed([60, 61, 5, 6, 7]) == [8, 9, 10], "an answer may begin otherwise, as with reasoning"


def test_an_answer_that_repeats_itself_is_proposed_too() -> None:
    assert proposed([50, 51, 52, 53, 50, 51, 52]) == [53, 50, 51, 52]


@given(
    answer=st.lists(st.integers(1, 4), max_size=40),
    predicted=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    parts=st.lists(st.integers(1, 9), min_size=40, max_size=40),
    most=st.integers(1, 8),
)
def test_proposals_do_not_depend_on_how_the_answer_arrived(
    answer: list[int], predicted: list[int], parts: list[int], most: int
) -> None:
    token_ids = list(PROMPT)
    proposer, place = PredictionProposer(token_ids, len(PROMPT), predicted), 0
    for part in parts:
        proposer.propose(most)
        token_ids += answer[place : place + part]
        place += part
    found = proposer.propose(most)
    assert found == proposed(answer, most, predicted)
    assert len(found) <= most
    assert min(found, default=1) >= 1, "the separator is no token"
