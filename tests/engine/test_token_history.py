"""Finding the last tokens earlier in a text: the longest agreement of the most recent places, at a bounded cost."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.proposing import token_history
from pagemill_engine.proposing.ngram import continuation
from pagemill_engine.proposing.token_history import MAX_COMPARED, MAX_PLACES, Agreement, TokenHistory

texts = st.lists(st.integers(0, 3), max_size=240)


def by_comparison(text: list[int], tokens: list[int]) -> Agreement | None:
    """The specification: compare every place."""
    if len(tokens) < 3:
        return None
    places = [end for end in range(len(text) - 1, 2, -1) if text[end - 3 : end] == tokens[-3:]]
    found = []
    for end in places[:MAX_PLACES]:
        length, most = 3, min(MAX_COMPARED, end, len(tokens))
        while length < most and text[end - length - 1] == tokens[-length - 1]:
            length += 1
        found.append(Agreement(end, length))
    return max(found, key=lambda match: match.length, default=None)  # the first of equal ones: the last in the text


@given(texts, st.lists(st.integers(1, 9), max_size=30))
def test_a_match_is_the_longest_agreement_however_the_tokens_arrived(tokens: list[int], pieces: list[int]) -> None:
    history, known = TokenHistory(), 0
    for piece in [*pieces, len(tokens)]:
        known = min(known + piece, len(tokens))
        history.extend(tokens[:known])
    assert history.find(tokens, tokens) == by_comparison(tokens, tokens)


@given(texts)
def test_a_match_is_found_after_every_token(tokens: list[int]) -> None:
    history = TokenHistory()
    for known in range(1, len(tokens) + 1):
        history.extend(tokens[:known])
        assert history.find(tokens[:known], tokens[:known]) == by_comparison(tokens[:known], tokens[:known])


@given(texts, st.lists(st.integers(0, 3), max_size=70))
def test_a_match_in_another_text_is_its_longest_agreement(text: list[int], tokens: list[int]) -> None:
    history = TokenHistory()
    history.extend(text)
    assert history.find(text, tokens) == by_comparison(text, tokens)


def test_places_beyond_the_window_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_history, "WINDOW_TOKENS", 100)
    tokens = [7, 8, 9, *range(1000, 1300), 7, 8, 9]
    history = TokenHistory()
    history.extend(tokens)
    assert history.find(tokens, tokens) is None
    tokens += [*range(2000, 2050), 7, 8, 9]
    history.extend(tokens)
    assert history.find(tokens, tokens) == Agreement(306, 3)


def test_a_repeated_token_is_compared_at_most_as_often_as_is_allowed() -> None:
    tokens = [5] * 4000
    history, num_calls = TokenHistory(), 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    history.extend(tokens)
    sys.setprofile(count)
    try:
        found = history.find(tokens, tokens)
    finally:
        sys.setprofile(None)
    assert found == Agreement(3999, MAX_COMPARED)
    assert num_calls < 5, "the first place agrees as far as is compared"


class Counted(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_a_search_reads_a_bounded_number_of_tokens_however_long_the_text_is() -> None:
    """Three tokens that stand everywhere, each time behind 40 others that agree and one that does not."""
    common = list(range(100, 140))
    tokens = Counted(
        [token for number in range(400) for token in [1000 + number, *common, 7, 8, 9]] + [*common, 7, 8, 9]
    )
    history = TokenHistory()
    history.extend(tokens)
    tokens.num_read = 0
    found = history.find(tokens, tokens)
    assert found is not None
    assert found.length == 43
    assert 16 * 43 < tokens.num_read <= 3 + 2 * MAX_PLACES * MAX_COMPARED
    before = tokens.num_read
    for token in (7, 8, 9) * 20:  # tokens of an answer arrive one by one
        tokens.append(token)
        history.extend(tokens)
    assert tokens.num_read - before == 3 * 60, "each has a place with the two before it"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 19), st.integers(0, 30))
def test_a_continuation_beyond_the_end_repeats_itself(tokens: list[int], start: int, most: int) -> None:
    start = min(start, len(tokens) - 1)
    text = list(tokens)
    for _ in range(most):
        text.append(text[len(text) - (len(tokens) - start)])
    assert continuation(tokens, start, most) == text[len(tokens) :]
