"""Stop strings: the result depends on the text alone, never on how it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.output.stops import StopMatcher

TEXT = st.text(alphabet="ab\n<", max_size=60)
STOPS = st.lists(st.text(alphabet="ab\n<", min_size=1, max_size=6), min_size=1, max_size=4)


def scan(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    delivered = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        delivered += text
        if stop is not None:
            return delivered, stop
    return delivered + matcher.flush(), None


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the match with the smallest end, then the longest stop string, by a slow search."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


@given(TEXT, STOPS, st.lists(st.integers(0, 7), max_size=20), st.booleans())
def test_any_chunking_equals_a_search_in_the_whole_text(
    text: str, stops: list[str], sizes: list[int], include_stop: bool
) -> None:
    match = first_match(text, stops)
    if match is None:
        expected: tuple[str, str | None] = (text, None)
    else:
        end, stop = match
        expected = (text[: end if include_stop else end - len(stop)], stop)
    assert scan(cut(text, sizes), stops, include_stop) == expected
    assert scan(list(text), stops, include_stop) == expected


@given(TEXT, STOPS)
def test_exactly_a_possible_start_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    delivered = ""
    for char in text:
        released, stop = matcher.push(char)
        delivered += released
        if stop is not None:
            return
        assert delivered + matcher.held == text[: len(delivered) + len(matcher.held)]
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("hello </e") == ("hello ", None)
    assert matcher.push("x") == ("</ex", None)
    assert matcher.push("</end") == ("", None)
    assert matcher.push("> more") == ("", "</end>")


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_a_long_stop_string_causes_no_quadratic_search() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"] * 16)
    released = "".join(matcher.push("a").text for _ in range(3000))
    assert len(released) + len(matcher.held) == 3000
    assert len(matcher.held) == 1023


@given(TEXT, STOPS, st.integers(0, 12))
def test_a_stop_string_may_begin_where_none_may_end(text: str, stops: list[str], least: int) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for number, char in enumerate(text, start=1):
        scanned = matcher.push(char, counts=number > least)
        shown += scanned.text
        if scanned.stop is not None:
            break
    else:
        shown += matcher.flush()
    ends = [end for end in range(least + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    longest = max((stop for stop in stops if ends and text[: ends[0]].endswith(stop)), key=len, default="")
    assert shown == text[: ends[0] - len(longest) if ends else None]
