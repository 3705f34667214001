"""One choice from tokens to text: independent of chunks, without overshoot, and resumed without loss."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut
from pagemill_engine.output.choice import ChoiceOutput
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import ChoiceResume
from pagemill_protocol.request.sampling import SamplingParams

TEXT = st.text(alphabet="abé€😀 \n", max_size=40)
STOPS = st.lists(st.text(alphabet="abé€ ", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 5), max_size=30)


def params(stop: list[str] | None = None, **fields: object) -> SamplingParams:
    return SamplingParams(stop=stop or [], max_tokens=None, **fields)  # type: ignore[arg-type]


def chunks(token_ids: Sequence[int], sizes: list[int]) -> list[Sequence[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(token_ids[start : start + size])
        start += size
    return [*pieces, token_ids[start:]]


def run(choice: ChoiceOutput, pieces: list[Sequence[int]]) -> tuple[str, list[int]]:
    """Push all pieces, the last one with the engine's finish reason "length"; return text and tokens."""
    text, token_ids = "", []
    for index, piece in enumerate(pieces):
        delta = choice.push(piece, None, "length" if index == len(pieces) - 1 else None)
        text += delta.text
        token_ids += delta.token_ids
    return text, token_ids


@given(TEXT, STOPS, CUTS)
def test_any_chunking_gives_the_same_text_tokens_and_reason(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    token_ids = byte_tokenizer.encode(text) if text else []
    whole = ChoiceOutput(byte_tokenizer, [], params(stops))
    cut = ChoiceOutput(byte_tokenizer, [], params(stops))
    expected = run(whole, [[token_id] for token_id in token_ids] or [[]])
    assert run(cut, chunks(token_ids, sizes)) == expected
    assert (cut.finish_reason, cut.stop_reason, cut.num_tokens) == (
        whole.finish_reason,
        whole.stop_reason,
        whole.num_tokens,
    )
    found = [text.find(stop) for stop in stops if stop in text]
    assert whole.finish_reason == ("stop" if found else "length")
    if not found:
        assert expected[0] == text


@given(TEXT, STOPS, st.integers(0, 60), CUTS)
def test_a_resumed_choice_continues_without_gaps_or_repeats(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], broken_after: int, sizes: list[int]
) -> None:
    token_ids = byte_tokenizer.encode(text) if text else []
    uninterrupted, _ = run(ChoiceOutput(byte_tokenizer, [], params(stops)), [token_ids])

    first = ChoiceOutput(byte_tokenizer, [], params(stops))
    delta = first.push(token_ids[:broken_after])
    if first.finish_reason is not None:
        assert delta.text == uninterrupted
        return
    resume = ChoiceResume(0, list(delta.token_ids), first.num_text_chars)
    second = ChoiceOutput(byte_tokenizer, [], params(stops), resume)
    rest, _ = run(second, chunks(token_ids[broken_after:], sizes))
    assert delta.text + rest == uninterrupted
    assert second.num_text_chars == len(uninterrupted)


REASONING = AnswerFormat(reasoning="think", starts_in_reasoning=True)


@given(
    st.lists(st.sampled_from(["a", "b€", "<", "</think>", "\n"]), max_size=12).map("".join),
    st.lists(st.sampled_from(["b", "a<", "k>", "</think>", "€"]), max_size=2),
    CUTS,
)
def test_tokens_of_reasoning_are_never_more_than_those_that_count(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    """A run of accepted tokens may reach beyond the stop string that ends the answer."""
    token_ids = byte_tokenizer.encode(text) if text else []
    whole, cut = (ChoiceOutput(byte_tokenizer, [], params(stops), answer_format=REASONING) for _ in range(2))
    run(whole, [[token_id] for token_id in token_ids] or [[]])
    run(cut, chunks(token_ids, sizes))
    assert cut.num_reasoning_tokens == whole.num_reasoning_tokens <= cut.num_tokens == whole.num_tokens
    if "<" not in text and not stops:
        assert whole.num_reasoning_tokens == len(token_ids)


def test_overshoot_appears_neither_in_text_nor_in_tokens_nor_in_logprobs(byte_tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(byte_tokenizer, [], params(["END"], logprobs=0))
    token_ids = byte_tokenizer.encode("one END two")
    logprobs = [LogprobsOut([token_id], [-1.0], 1) for token_id in token_ids]
    delta = choice.push(token_ids, logprobs)
    assert delta.text == "one "
    assert len(delta.token_ids) == len(delta.logprobs) == choice.num_tokens == len("one END")
    assert (choice.finish_reason, choice.stop_reason, choice.stopped_by_text) == ("stop", "END", True)
    assert choice.push(byte_tokenizer.encode("more"), None, "length").text == ""


def test_the_stop_string_is_included_if_the_client_asked_for_it(byte_tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(byte_tokenizer, [], params(["END"], include_stop_str_in_output=True))
    assert choice.push(byte_tokenizer.encode("one END two")).text == "one END"


def test_stop_strings_count_only_after_min_tokens(byte_tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(byte_tokenizer, [], params(["ab"], min_tokens=4))
    assert choice.push(byte_tokenizer.encode("ababxab")).text == "ababx"
    assert choice.num_tokens == 7
    begun_before = ChoiceOutput(byte_tokenizer, [], params(["abc"], min_tokens=2))
    assert [begun_before.push(byte_tokenizer.encode(each)).text for each in "xabc"] == ["x", "", "", ""]
    assert (begun_before.finish_reason, begun_before.stop_reason) == ("stop", "abc")


def test_a_stop_token_is_counted_and_named_but_not_shown(byte_tokenizer: Tokenizer) -> None:
    (stop_id,) = byte_tokenizer.encode("!")
    choice = ChoiceOutput(byte_tokenizer, [], params(stop_token_ids=[stop_id]))
    delta = choice.push(byte_tokenizer.encode("hi!"), None, "stop")
    assert (delta.text, choice.num_tokens, choice.stop_reason) == ("hi", 3, stop_id)
    shown = ChoiceOutput(byte_tokenizer, [], params(stop_token_ids=[stop_id], include_stop_str_in_output=True))
    assert shown.push(byte_tokenizer.encode("hi!"), None, "stop").text == "hi!"


def test_half_a_character_is_held_until_it_is_complete_or_the_choice_ends(byte_tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(byte_tokenizer, [], params())
    euro = byte_tokenizer.encode("€")
    assert choice.push(euro[:2]).text == ""
    assert choice.push(euro[2:]).text == "€"
    assert choice.push(euro[:1], None, "length").text == "�"


def test_a_stop_string_completed_by_the_last_flush_still_stops(byte_tokenizer: Tokenizer) -> None:
    choice = ChoiceOutput(byte_tokenizer, [], params(["�"]))
    delta = choice.push([*byte_tokenizer.encode("a"), byte_tokenizer.encode("€")[0]], None, "length")
    assert (delta.text, choice.finish_reason) == ("a", "stop")
    assert not choice.stopped_by_text  # the engine has already ended the choice


def test_a_resumed_choice_that_contains_the_stop_string_ends_at_the_next_output(byte_tokenizer: Tokenizer) -> None:
    resume = ChoiceResume(0, byte_tokenizer.encode("one END"), num_text_chars=2)
    choice = ChoiceOutput(byte_tokenizer, [], params(["END"]), resume)
    delta = choice.push(byte_tokenizer.encode("x"))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("e ", (), "stop")
    assert choice.stopped_by_text


def test_a_choice_resumed_after_a_stop_token_does_not_show_it(byte_tokenizer: Tokenizer) -> None:
    (stop_id,) = byte_tokenizer.encode("!")
    resume = ChoiceResume(0, byte_tokenizer.encode("hi!"), num_text_chars=1)
    choice = ChoiceOutput(byte_tokenizer, [], params(stop_token_ids=[stop_id]), resume)
    delta = choice.push((), None, "stop")
    assert (delta.text, delta.finish_reason, choice.stop_reason) == ("i", "stop", stop_id)
    shown = ChoiceOutput(byte_tokenizer, [], params(stop_token_ids=[stop_id], include_stop_str_in_output=True), resume)
    assert shown.push((), None, "stop").text == "i!"
    end = ChoiceResume(0, [*byte_tokenizer.encode("hi"), *byte_tokenizer.eos_token_ids], num_text_chars=0)
    assert ChoiceOutput(byte_tokenizer, [], params(), end).push((), None, "stop").text == "hi"
    early = ChoiceOutput(byte_tokenizer, [], params(stop_token_ids=[stop_id], min_tokens=3), resume)
    assert early.push(byte_tokenizer.encode("x"), None, "length").text == "i!x"


def test_a_finished_choice_of_a_resumed_answer_counts_its_tokens_and_sends_nothing(byte_tokenizer: Tokenizer) -> None:
    resume = ChoiceResume(0, byte_tokenizer.encode("done"), num_text_chars=4, finished=True)
    choice = ChoiceOutput(byte_tokenizer, [], params(), resume)
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 4)
    assert choice.push([1], None, "length").text == ""
