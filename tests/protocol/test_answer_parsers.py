"""Answers of models, cut into any pieces, are parsed into the same reasoning, text and calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_api.answers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.answers.registry import reasoning_parser_names, tool_parser_names
from pagemill_protocol.request.answer_format import AnswerFormat

ROME = ("weather", {"city": "Rome"})
OSLO = ("weather", {"city": 'Os}lo"]'})
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
CALLS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
CASES = {
    "hermes": [
        (
            'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"city": "Os}lo\\"]"}, "name": "weather"}</tool_call>',
            "Let me see.",
            [ROME, OSLO],
        ),
        ('<tool_call>{"name": "now"}</tool_call> done', "done", [("now", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
        ("<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>", []),
        ("a < b and <tool_ is text\n", "a < b and <tool_ is text\n", []),
    ],
    "llama3-json": [
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ('<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", {"a": 1}), ("g", {})]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("It is 20 degrees.", "It is 20 degrees.", []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now"}]', "", [ROME, ("now", {})]),
        ('Hm.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}', "Hm.", [ROME, ("now", {})]),
        ('[TOOL_CALLS]weather{"city": "Rome"}', "", [ROME]),
    ],
    "pythonic": [
        (
            "[weather(city='Rome'), a.b(x=[1, {'y': true}], z=null)]",
            "",
            [ROME, ("a.b", {"x": [1, {"y": True}], "z": None})],
        ),
        ('<|python_start|>[weather(city="Rome")]<|python_end|>', "", [ROME]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("Words.", "Words.", []),
    ],
    "qwen3-coder": [
        (
            "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            "Sure.",
            [("weather", {"city": "Rome", "days": 2})],
        ),
        ("<tool_call><function=now></function></tool_call>", "", [("now", {})]),
        ("<function=weather><parameter=city>42</parameter></function>", "", [("weather", {"city": "42"})]),
    ],
    "deepseek": [
        (CALLS % ((V3 % '{"city": "Rome"}') + "\n" + (V3 % json.dumps(OSLO[1]))), "", [ROME, OSLO]),
        ("Text." + CALLS % (V31 % '{"city": "Rome"}'), "Text.", [ROME]),
    ],
    "harmony": [
        (
            "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
            "One moment.",
            [ROME],
        ),
        ("<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    ],
}
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]
FORMS = [
    *(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}) for name in CASES),
    *(AnswerFormat(tools=name, reasoning="think", string_parameters={"weather": ["city"]}) for name in CASES),
    AnswerFormat(reasoning="magistral", starts_in_reasoning=True),
]


def events_of(form: AnswerFormat, *pieces: str) -> list[Event]:
    parser = AnswerParser(form)
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def merged(events: list[Event]) -> list[Event]:
    """Join neighbouring events of one text into one event."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning | CallArguments) and type(last) is type(event):
            joined[-1] = event._replace(text=last.text + event.text)
        else:
            joined.append(event)
    return joined


def calls_of(events: list[Event]) -> list[tuple[str, object]]:
    calls = []
    for at, event in enumerate(events):
        if isinstance(event, CallBegin):
            arguments = events[at + 1]
            assert isinstance(arguments, CallArguments)
            assert isinstance(events[at + 2], CallEnd)
            calls.append((event.name, json.loads(arguments.text)))
    return calls


def text_of(events: list[Event], kind: type[Content] | type[Reasoning] = Content) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_every_registered_parser_has_a_case() -> None:
    assert set(tool_parser_names()) == {"auto", "none", *CASES}
    assert reasoning_parser_names() == ["auto", "none", "think", "magistral", "harmony"]


@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_an_answer_is_parsed_into_text_and_calls(
    name: str, answer: str, content: str, calls: list[tuple[str, object]]
) -> None:
    events = events_of(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}), answer)
    assert (text_of(events), calls_of(events)) == (content, calls)


@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_reasoning_comes_before_text_and_calls(
    name: str, answer: str, content: str, calls: list[tuple[str, object]]
) -> None:
    form = AnswerFormat(tools=name, reasoning="think", string_parameters={"weather": ["city"]})
    before = (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
        if name == "harmony"
        else "<think>\nWhy?\n</think>\n\n"
    )
    events = events_of(form, before + answer)
    assert events[0] == Reasoning("Why?")
    assert (text_of(events).strip(), calls_of(events)) == (content.strip(), calls)


SNIPPETS = st.sampled_from(
    [answer for _, answer, _, _ in ALL]
    + ["<think>", "</think>", "[THINK]", "[/THINK]", " \n", "{", '"', "\\", "}", "[", "(", ")", "words", "=", ">", ","]
)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.sampled_from(FORMS), st.lists(SNIPPETS, max_size=4).map("".join), st.data())
def test_events_do_not_depend_on_where_the_answer_is_cut(form: AnswerFormat, answer: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(answer)))
    answer = answer[start:] if data.draw(st.booleans()) else answer
    cut = data.draw(st.integers(0, len(answer)))
    whole, single = AnswerParser(form), AnswerParser(form)
    before = merged(whole.push(answer[:cut]))
    assert merged([event for char in answer[:cut] for event in single.push(char)]) == before
    assert single.in_reasoning == whole.in_reasoning
    rest = [event for char in answer[cut:] for event in single.push(char)] + single.finish()
    assert merged(whole.push(answer[cut:]) + whole.finish()) == merged(rest)


@pytest.mark.parametrize("name", CASES)
def test_a_truncated_answer_has_the_arguments_received_so_far(name: str) -> None:
    answer = CASES[name][0][0]
    for length in range(len(answer)):
        events = events_of(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}), answer[:length])
        assert sum(isinstance(event, CallBegin) for event in events) == sum(
            isinstance(event, CallEnd) for event in events
        )


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = AnswerParser(AnswerFormat(tools="hermes"))
    assert parser.push('<tool_call>{"name": "f"') == [CallBegin("f")]
    assert parser.push(', "arguments": {"a') == [CallArguments('{"a')]
    assert parser.push('": 1}') == [CallArguments('": 1}')]


TRIGGERS = {
    "hermes": ('<tool_call>\n{"name": "weather"', ', "arguments": {'),
    "llama3-json": ('{"name": "weather"', ', "parameters": {'),
    "mistral": ('[TOOL_CALLS] [{"name": "weather"', ', "arguments": {'),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>", "{"),
    "harmony": ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", "{"),
    # These formats write arguments one by one, and each becomes JSON when it is complete.
    "qwen3-coder": ("<tool_call>\n<function=weather>", "\n<parameter=city>\nRome\n</parameter>"),
    "pythonic": ("[weather(city='Rome'", ""),
}
"""For each parser, a text that names the function and the text that produces the first piece of the arguments."""


@pytest.mark.parametrize("name", CASES)
def test_a_calls_first_events_are_at_most_one_character_late(name: str) -> None:
    """A token has at least one character, so the first streamed delta is at most one token late."""
    named, argued = TRIGGERS[name]
    parser = AnswerParser(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}))
    seen: dict[type[Event], int] = {}
    for num_chars, char in enumerate(named + argued + ('"' if argued.endswith("{") else ")"), start=1):
        for event in parser.push(char):
            seen.setdefault(type(event), num_chars)
    assert seen[CallBegin] <= len(named) + 1
    assert seen[CallArguments] <= len(named + argued) + 1


def test_without_parallel_calls_only_the_first_call_is_returned() -> None:
    text, content, calls = CASES["hermes"][0]
    events = events_of(AnswerFormat(tools="hermes", parallel=False), text)
    assert (text_of(events), calls_of(events)) == (content, calls[:1])


def test_an_answer_of_reasoning_only_has_no_text() -> None:
    form = AnswerFormat(reasoning="think", starts_in_reasoning=True)
    assert events_of(form, "Hm, <", "thi") == [Reasoning("Hm, <thi")]


def test_hidden_reasoning_is_left_out() -> None:
    assert events_of(AnswerFormat(reasoning="think", shows_reasoning=False), "<think>a</think>b") == [Content("b")]
