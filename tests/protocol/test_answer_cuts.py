"""An answer that is cut anywhere, by a limit, a stop string or an end token, is parsed into what it says so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

import pytest
from answer_cases import ALL, calls_of, events_of, merged, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.output.choice import ChoiceOutput
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.sampling import SamplingParams

MARKERS = {
    "hermes": ["<tool_call>"],
    "llama3-json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "pythonic": ["<|python_start|>", "<|python_tag|>"],
    "qwen3-coder": ["<tool_call>", "<function="],
    "seed-oss": ["<seed:tool_call>", "<function="],
    "minimax-m2": ["<minimax:tool_call>", '<invoke name="'],
    "glm": ["<tool_call>"],
    "kimi-k2": ["<|tool_calls_section_begin|>"],
    "gemma4": ["<|tool_call>"],
    "nemotron": ["<TOOLCALL>"],
    "hunyuan": ["<tool_calls>"],
    "lfm2": ["<|tool_call_start|>"],
    "deepseek": ["<｜tool▁calls▁begin｜>"],
    "harmony": ["<|end|>", "<|call|>", "<|return|>"],
}
"""Beginnings of calls, or ends of messages, which are text while they are incomplete."""
AMBIGUOUS = {"llama3-json": r'\{(?!.*"name": "\w+")', "pythonic": r"\[(?!\w+\()"}
"""Beginnings of calls without a marker, which are text as long as they may be."""
BEFORE = {
    "": ("", ""),
    "think": ("<think>\nWhy?\n</think>\n\n", "Why?"),
    "harmony": ("<|channel|>analysis<|message|>Why?<|end|><|start|>assistant", "Why?"),
}
SPECIAL = ["<think>", "</think>", *{marker for each in MARKERS.values() for marker in each if len(marker) > 2}]


def form_of(name: str, *, reasons: bool = False, forced: bool = False) -> AnswerFormat:
    reasoning = ("harmony" if name == "harmony" else "think") if reasons else ""
    return AnswerFormat(tools=name, reasoning=reasoning, forced=forced, string_parameters={"weather": ["city"]})


def expected_text(name: str, answer: str, content: str, before: str) -> Callable[[str], str]:
    """Return what makes the text of a cut answer, from the text of the whole one."""
    begin = answer.index(content) if content else 0

    def text_of_cut(cut: str) -> str:
        if re.match(AMBIGUOUS.get(name, r"(?!)"), cut, re.DOTALL):
            return cut
        if name == "harmony" and len(cut) <= begin:  # a header, which begins with a special token
            return cut if cut == "<" and not before else ""
        if len(cut) <= begin and content:
            return partial_marker(name, cut)
        said = cut[begin : begin + len(content)]
        if said.endswith(tuple(MARKERS[name])):  # the beginning of a call, until something else follows
            return said.removesuffix("<tool_call>")
        return said + partial_marker(name, cut[begin + len(said) :])

    return text_of_cut


def partial_marker(name: str, text: str) -> str:
    is_partial = any(marker.startswith(text.strip()) and marker != text.strip() for marker in MARKERS[name])
    return text if is_partial else ""


def chunkings(text: str) -> list[list[str]]:
    """Return the text whole, by character, and by drawn chunks."""
    random = Random(text)
    edges = sorted(random.choices(range(len(text) + 1), k=3))
    drawn = [text[begin:end] for begin, end in zip([0, *edges], [*edges, len(text)], strict=True)]
    return [[text], list(text), drawn]


def by_token(tokenizer: Tokenizer, form: AnswerFormat, text: str) -> list[Event]:
    """Return the events of the text's tokens, which arrive one at a time and end at a limit."""
    sampling = SamplingParams(max_tokens=10**6, skip_special_tokens=False, ignore_eos=True)
    choice = ChoiceOutput(tokenizer, [], sampling, answer_format=form)
    token_ids = tokenizer.encode(text)
    deltas = [choice.push([token_id]) for token_id in token_ids[:-1]]
    deltas.append(choice.push(token_ids[-1:], finish_reason="length"))
    assert "".join(delta.text for delta in deltas) == text
    return merged([event for delta in deltas for event in delta.events or ()])


def is_cut_of(cut: Sequence[Event], whole: Sequence[Event]) -> bool:
    """Whether the calls of a cut answer are those of the whole one, the last of them with a part of its arguments."""
    begun, all_begun = _calls(cut), _calls(whole)
    for at, (name, arguments, ended) in enumerate(begun):
        if name != all_begun[at][0] or not all_begun[at][1].startswith(arguments):
            return False
        if ended != (arguments == all_begun[at][1]) or not (ended or at == len(begun) - 1):
            return False
    return True


def _calls(events: Sequence[Event]) -> list[tuple[str, str, bool]]:
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, "", False))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text, False)
        elif isinstance(event, CallEnd):
            calls[-1] = (*calls[-1][:2], True)
    return calls


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_an_answer_cut_anywhere_has_each_of_its_characters_once(
    name: str,
    answer: str,
    content: str,
    calls: list[tuple[str, object]],
    reasons: bool,
    with_tokens: Callable[[Sequence[str]], Tokenizer],
) -> None:
    form = form_of(name, reasons=reasons)
    before, thought = BEFORE[form.reasoning]
    tokenizer = with_tokens(SPECIAL)
    whole = events_of(form, before + answer)
    expected = expected_text(name, answer, content, before)
    for length in range(1, len(answer) + 1):
        cut = answer[:length]
        events = events_of(form, before + cut)
        assert text_of(events).strip() == expected(cut).strip(), cut
        assert text_of(events, Reasoning) == thought
        assert is_cut_of(events, whole), cut
        for pieces in chunkings(before + cut):
            assert events_of(form, *pieces) == events, pieces
        assert by_token(tokenizer, form, before + cut) == events, cut


SNIPPETS = st.sampled_from(
    [*(answer for _, answer, _, _ in ALL), *SPECIAL, " \n", "{", '"', "}", "[", "(", "<", "words", ">", ","]
)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.sampled_from(list(MARKERS)), st.booleans(), st.lists(SNIPPETS, max_size=4).map("".join), st.data())
def test_any_answer_cut_anywhere_ends_equally_however_it_arrives(
    name: str, reasons: bool, answer: str, data: st.DataObject
) -> None:
    form = form_of(name, reasons=reasons)
    cut = answer[: data.draw(st.integers(0, len(answer)))]
    events = events_of(form, cut)
    for pieces in chunkings(cut):
        assert events_of(form, *pieces) == events, pieces
    for kind in (Content, Reasoning):
        rest = iter(cut)
        assert all(char in rest for char in text_of(events, kind)), "each character is there once, in order"


FORCED = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": ',
    "llama3-json": '{"name": "weather", "parameters": ',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": ',
    "pythonic": "[weather(",
    "qwen3-coder": "<tool_call>\n<function=weather>\n",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
    "seed-oss": "<seed:tool_call>\n<function=weather>\n",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n',
    "glm": "<tool_call>weather\n",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": ',
    "hunyuan": '<tool_calls>[{"name": "weather", "arguments": ',
    "lfm2": "<|tool_call_start|>[weather(",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
}


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_that_is_cut_leaves_no_text(name: str) -> None:
    text = FORCED[name]
    for length in range(1, len(text) + 1):
        for pieces in chunkings(text[:length]):
            assert events_of(form_of(name, forced=True), *pieces) in ([], [CallBegin("weather")]), text[:length]
    assert events_of(form_of(name, forced=True), text) == [CallBegin("weather")]


IN_REASONING = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "</think>"}}</tool_call>',
    "llama3-json": '<|python_tag|>{"name": "weather", "parameters": {"city": "</think>"}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "</think>"}',
    "pythonic": '<|python_start|>[weather(city="Rome")]<|python_end|>',
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "</think>"}',
    "seed-oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function></seed:tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n',
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "</think>"}',
    "gemma4": '<|tool_call>call:weather{city:<|"|></think><|"|>}<tool_call|>',
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "</think>"}}]</TOOLCALL>',
    "hunyuan": '<tool_calls>[{"name": "weather", "arguments": {"city": "</think>"}}]</tool_calls>',
    "lfm2": '<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>',
}


@pytest.mark.parametrize("name", IN_REASONING)
def test_a_call_ends_reasoning_that_was_not_ended(name: str) -> None:
    form = AnswerFormat(
        tools=name, reasoning="think", starts_in_reasoning=True, string_parameters={"weather": ["city"]}
    )
    city = "Rome" if "Rome" in IN_REASONING[name] else "</think>"
    for pieces in chunkings("Why? " + IN_REASONING[name]):
        events = events_of(form, *pieces)
        assert (text_of(events, Reasoning), text_of(events)) == ("Why?", "")
        assert calls_of(events) == [("weather", {"city": city})]


@pytest.mark.parametrize("name", IN_REASONING)
def test_reasoning_about_markers_is_no_call(name: str) -> None:
    form = AnswerFormat(tools=name, reasoning="think", starts_in_reasoning=True)
    (marker, *_) = MARKERS[name]
    for pieces in chunkings(f"I write {marker} or {marker}</think>Yes."):
        events = events_of(form, *pieces)
        assert events == [Reasoning(f"I write {marker} or {marker}"), Content("Yes.")]


def test_a_call_in_harmony_may_contain_its_markers_and_follow_reasoning_that_was_not_ended() -> None:
    call = "<|channel|>commentary to=functions.weather<|message|>"
    arguments = '{"city": "<|call|> and <|end|>"}'
    for pieces in chunkings(f"<|channel|>analysis<|message|>Why?{call}{arguments}<|call|>"):
        assert events_of(form_of("harmony"), *pieces) == [
            Reasoning("Why?"),
            CallBegin("weather"),
            CallArguments(arguments),
            CallEnd(),
        ]


def test_a_call_is_complete_with_its_arguments_and_calls_that_are_not_returned_do_not_count() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1'
    complete = {call: False, call + "}": True, call + "}}</tool_call>": True, call + "}}" + call: False}
    for text, expected in complete.items():
        parser = AnswerParser(AnswerFormat(tools="hermes"))
        parser.push(text)
        parser.finish()
        assert parser.has_complete_calls == expected, text
    first = AnswerParser(AnswerFormat(tools="hermes", parallel=False))
    first.push(call + "}}" + call)
    first.finish()
    assert first.has_complete_calls
