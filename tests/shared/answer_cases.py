"""Answers of models in every format, with their text and calls, and what parsers make of them."""

from __future__ import annotations

import json

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.answers.parser import AnswerParser
from pagemill_protocol.request.answer_format import AnswerFormat

ROME = ("weather", {"city": "Rome"})
OSLO = ("weather", {"city": 'Os}lo"]'})
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
CALLS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
CASES: dict[str, list[tuple[str, str, list[tuple[str, object]]]]] = {
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
    "seed-oss": [
        (
            "Sure.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2"
            "</parameter>\n</function>\n</seed:tool_call>",
            "Sure.",
            [("weather", {"city": "Rome", "days": 2})],
        ),
        ("<seed:tool_call><function=now></function></seed:tool_call>", "", [("now", {})]),
    ],
    "minimax-m2": [
        (
            'Sure.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
            '<invoke name="f">\n<parameter name="days">[1, {"a": "b"}]</parameter>\n</invoke>\n</minimax:tool_call>',
            "Sure.",
            [ROME, ("f", {"days": [1, {"a": "b"}]})],
        ),
        ('<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>', "", [("now", {})]),
    ],
    "glm": [
        (
            "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            "Sure.",
            [("weather", {"city": "Rome", "days": 2}), ("now", {})],
        ),
        (
            "<tool_call>weather<arg_key>city</arg_key><arg_value>a\nb</arg_value></tool_call>",
            "",
            [("weather", {"city": "a\nb"})],
        ),
    ],
    "kimi-k2": [
        (
            "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.a.b:1<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            "Sure.",
            [ROME, ("a.b", {})],
        ),
    ],
    "gemma4": [
        (
            'Sure.<|tool_call>call:weather{city:<|"|>Rome "<|"|>,days:2,at:[{x:<|"|>é\n<|"|>,<|"|>y<|"|>:null}],z:true}'
            "<tool_call|><|tool_call>call:now{}<tool_call|>",
            "Sure.",
            [
                ("weather", {"city": 'Rome "', "days": 2, "at": [{"x": "é\n", "y": None}], "z": True}),
                ("now", {}),
            ],
        ),
        ("<|tool_call>call:weather{city:Rome}<tool_call|>", "", [ROME]),
    ],
    "nemotron": [
        (
            'Sure.\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
            "</TOOLCALL>",
            "Sure.",
            [ROME, ("now", {})],
        ),
    ],
    "hunyuan": [
        (
            'Sure.<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>',
            "Sure.",
            [ROME],
        ),
    ],
    "lfm2": [
        (
            'Sure.<|tool_call_start|>[weather(city="Rome"), now()]<|tool_call_end|>',
            "Sure.",
            [ROME, ("now", {})],
        ),
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
"""The name of the parser, the answer, its text and its calls."""


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
