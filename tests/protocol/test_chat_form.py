"""Forced and strict tool calls: whatever their grammar allows, the parser reads as valid calls."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagemill_api.answers.events import CallArguments, CallBegin, Content, Event, Reasoning
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.answers.registry import REASONING_ENDS, call_syntax, tool_formats
from pagemill_api.grammars import check
from pagemill_api.grammars.parser import fault_of, parser_limits
from pagemill_api.grammars.schemas.reading import text_properties
from pagemill_api.grammars.source import grammar_text
from pagemill_api.openai.chat_form import check_schemas, prescribed, unheld_fields
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.prepare import check_form
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.structured_outputs import StructuredOutputs

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", 'Os}lo"]']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"hot": {"type": "boolean"}, "note": {"type": "string", "maxLength": 3}},
            "required": ["note"],
            "additionalProperties": False,
        }
    },
}
WORD = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 4}}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "say.it": WORD, "now": None}
SPECIAL = (
    "<tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "[THINK]",
    "[/THINK]",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<arg_key>",
    "</arg_value>",
    "<|tool_call_start|>",
)
EOS = 256
CLOSING = frozenset(b'"}]<')
TEMPLATES = {"mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"], "deepseek": ["", "```json"]}
VARIANTS = [(name, template) for name in tool_formats() for template in TEMPLATES.get(name, [""])]


class Tokens:
    """A vocabulary with a token for each byte, an end token, and the special tokens."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"<eos>"] + [each.encode() for each in SPECIAL]
    special_token_ids = list(range(EOS, EOS + 1 + len(SPECIAL)))  # noqa: RUF012 read by llguidance

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(Tokens()))
IDS = {text: EOS + 1 + at for at, text in enumerate(SPECIAL)}


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatCompletionRequest)


def tools(*, strict: bool | None = None, **schemas: Any) -> list[dict[str, Any]]:
    functions = [{"name": name, "parameters": schema, "strict": strict} for name, schema in schemas.items()]
    return [{"type": "function", "function": each} for each in functions]


ALL = tools(**SCHEMAS)


def matcher_of(outputs: StructuredOutputs | None, special: dict[str, int] = IDS) -> LLMatcher:
    assert outputs is not None
    matcher = LLMatcher(VOCABULARY, grammar_text(outputs, special), log_level=0, limits=parser_limits())
    assert fault_of(matcher) == ""
    return matcher


def walk(matcher: LLMatcher, seed: int, start: str = "") -> str:
    """Return a random answer that the grammar allows after `start`: printable letters, later letters that end it."""
    draw = random.Random(seed)
    token_ids = spelled(start)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids), "the start must fit the grammar"
    for num_tokens in range(20_000):
        if matcher.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        likely = [each for each in allowed if each >= EOS or 32 <= each < 127] or allowed
        if num_tokens > 300:
            likely = [each for each in likely if each >= EOS or each in CLOSING] or likely
        chosen = EOS if EOS in likely and draw.random() < 0.3 else draw.choice(likely)
        assert matcher.consume_token(chosen)
        token_ids.append(chosen)
    assert matcher.is_stopped()
    return b"".join(Tokens.tokens[each] for each in token_ids if each != EOS).decode()


def spelled(text: str) -> list[int]:
    token_ids: list[int] = []
    while text:
        special = next((each for each in SPECIAL if text.startswith(each)), None)
        token_ids += [IDS[special]] if special else list(text[0].encode())
        text = text[len(special or text[0]) :]
    return token_ids


def read(answer: str, **fields: Any) -> list[Event]:
    form = AnswerFormat(string_parameters={"say.it": ["word"], "weather": ["city"]}, **fields)
    parser = AnswerParser(form)
    return [*parser.push(answer), *parser.finish()]


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        if isinstance(event, CallArguments):
            calls[-1][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check_calls(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name] or {"type": "object", "maxProperties": 0})


@pytest.mark.parametrize(("name", "template"), VARIANTS)
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_required_calls_are_parsed_as_valid_calls_and_nothing_else(
    name: str, template: str, special: bool, seed: int
) -> None:
    outputs = prescribed(request(tools=ALL, tool_choice="required"), call_syntax(name, template), "", "")
    answer = walk(matcher_of(outputs, IDS if special else {}), seed)
    events = read(answer, tools=name)
    calls = calls_of(events)
    assert calls, answer
    check_calls(calls)
    assert not any(isinstance(event, Content) for event in events), answer


@pytest.mark.parametrize(("name", "template"), VARIANTS)
def test_a_named_function_is_called_exactly_once(name: str, template: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    outputs = prescribed(request(tools=ALL, tool_choice=named), call_syntax(name, template), "", "")
    for seed in range(5):
        calls = calls_of(read(walk(matcher_of(outputs), seed), tools=name))
        assert [each for each, _ in calls] == ["weather"]
        check_calls(calls)


@pytest.mark.parametrize(("name", "template"), VARIANTS)
def test_without_parallel_calls_there_is_exactly_one_call(name: str, template: str) -> None:
    body = request(tools=ALL, tool_choice="required", parallel_tool_calls=False)
    outputs = prescribed(body, call_syntax(name, template), "", "")
    for seed in range(5):
        assert len(calls_of(read(walk(matcher_of(outputs), seed), tools=name))) == 1


STARTS = {
    "hermes": ("Well. <tool_call>", "Well."),
    "qwen3-coder": ("Well. <tool_call>", "Well."),
    "mistral": ("Well. [TOOL_CALLS]", "Well."),
    "deepseek": ("Well. <｜tool▁calls▁begin｜>", "Well."),
    "llama3-json": ('{"name": ', ""),
    "pythonic": ("[", ""),
    "harmony": ("<|channel|>commentary to=functions.", ""),
    "kimi-k2": ("Well. <|tool_calls_section_begin|>", "Well."),
    "gemma4": ("Well. <|tool_call>", "Well."),
    "minimax-m2": ("Well. <minimax:tool_call>", "Well."),
    "seed-oss": ("Well. <seed:tool_call>", "Well."),
    "glm": ("Well. <tool_call>", "Well."),
    "nemotron": ("Well. <TOOLCALL>", "Well."),
    "hunyuan": ("Well. <tool_calls>", "Well."),
    "lfm2": ("Well. <|tool_call_start|>", "Well."),
}


@pytest.mark.parametrize(("name", "template"), VARIANTS)
def test_a_strict_call_may_follow_free_text_and_is_constrained_from_its_marker_on(name: str, template: str) -> None:
    body = request(tools=tools(strict=True, **SCHEMAS), parallel_tool_calls=False)
    outputs = prescribed(body, call_syntax(name, template), "", "")
    start, text = STARTS[name]
    for seed in range(8):
        events = read(walk(matcher_of(outputs), seed, start), tools=name)
        calls = calls_of(events)
        assert len(calls) == 1
        check_calls(calls)
        assert "".join(each.text for each in events if isinstance(each, Content)) == text


@pytest.mark.parametrize("name", list(tool_formats()))
def test_with_strict_tools_an_answer_may_be_text(name: str) -> None:
    outputs = prescribed(request(tools=tools(strict=True, **SCHEMAS)), call_syntax(name, ""), "", "")
    answer = ("<|channel|>final<|message|>" if name == "harmony" else "") + "It is sunny, [1] { or <so>."
    matcher = matcher_of(outputs)
    assert matcher.try_consume_tokens(spelled(answer)) == len(spelled(answer))
    assert matcher.is_accepting()


def test_with_strict_tools_other_tools_accept_any_arguments() -> None:
    loose = {"type": "object", "properties": {"at": {"type": "integer", "not": {}}}}
    both = [*tools(strict=True, weather=WEATHER), *tools(other=loose)]
    outputs = prescribed(request(tools=both), call_syntax("hermes", ""), "", "")
    answer = '<tool_call>\n{"name": "other", "arguments": {"at": "noon", "b": [1]}}\n</tool_call>'
    matcher = matcher_of(outputs)
    assert matcher.try_consume_tokens(spelled(answer)) == len(spelled(answer))


def test_tools_that_are_neither_strict_nor_forced_constrain_nothing() -> None:
    assert prescribed(request(tools=ALL), call_syntax("hermes", ""), "think", "") is None
    assert prescribed(request(tools=ALL, tool_choice="none"), None, "", "") is None


@pytest.mark.parametrize("name", list(tool_formats()))
def test_with_a_form_an_answer_consists_of_calls_or_has_the_form(name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    outputs = prescribed(
        request(tools=tools(strict=True, **SCHEMAS), response_format=form), call_syntax(name, ""), "", ""
    )
    kinds = set()
    for seed in range(12):
        events = read(walk(matcher_of(outputs), seed), tools=name)
        text = "".join(each.text for each in events if isinstance(each, Content))
        assert bool(text) != bool(calls_of(events))
        assert not text or json.loads(text) == {"x": 1}
        kinds.add(bool(text))
    assert kinds == {True, False} or name == "llama3-json"


@pytest.mark.parametrize(
    ("reasoning", "is_open"),
    [("think", True), ("think", False), ("magistral", True), ("magistral", False), ("harmony", False)],
)
@pytest.mark.parametrize("form", [{"guided_choice": ["yes", "no"]}, {"tools": ALL, "tool_choice": "required"}])
def test_the_form_applies_after_the_reasoning(reasoning: str, is_open: bool, form: dict[str, Any]) -> None:
    begin, end = REASONING_ENDS[reasoning]
    tool_format = "harmony" if reasoning == "harmony" else "hermes"
    outputs = prescribed(
        request(**form), call_syntax(tool_format, ""), reasoning, "prompt" + (begin + "\n" if is_open else "")
    )
    start = ("" if is_open else begin) + "Any [text], {even} <this>?" + end
    for seed in range(5):
        answer = walk(matcher_of(outputs), seed, start)
        tools_used = tool_format if "tools" in form or reasoning == "harmony" else ""
        events = read(answer, tools=tools_used, reasoning=reasoning, starts_in_reasoning=is_open)
        assert "".join(each.text for each in events if isinstance(each, Reasoning)) == "Any [text], {even} <this>?"
        text = "".join(each.text for each in events if isinstance(each, Content))
        assert calls_of(events) if "tools" in form else text in ("yes", "no")


def test_the_form_applies_at_once_if_the_prompt_has_closed_the_reasoning() -> None:
    outputs = prescribed(request(guided_choice=["yes"]), None, "think", "<think>\n\n</think>\n\n")
    assert outputs == StructuredOutputs(choice=("yes",))


def test_a_model_that_may_reason_may_also_answer_at_once() -> None:
    outputs = prescribed(request(guided_choice=["yes"]), None, "think", "<|im_start|>assistant\n")
    assert walk(matcher_of(outputs), 0, "yes") == "yes"


BOMB = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{100}){100}{100}"}}}


@pytest.mark.parametrize(
    ("schema", "param", "says"),
    [
        ({"type": "object", "properties": {"a": {"contains": {}}}}, "tools[1].function.parameters", "contains"),
        ({"type": "string"}, "tools[1].function.parameters.type", '"object"'),
        ({"type": 7, "properties": []}, "tools[1].function.parameters.type", '"object"'),
        ({"$ref": "#"}, "tools[1].function.parameters", "without end"),
        ({"properties": {"a": {"enum": ["x" * 9000]}}}, "tools[1].function.parameters", "9000 characters"),
        (BOMB, "tools[1].function.parameters", "repetitions"),
    ],
)
def test_an_unsupported_schema_is_refused_at_once_with_its_path(schema: Any, param: str, says: str) -> None:
    check_form(request(tools=tools(strict=True, weather=WEATHER)))  # starts the process
    took_s = []
    for number in range(3):
        bad = {**schema, "description": str(number)}  # verdicts are cached by content
        strict = request(tools=tools(strict=True, weather=WEATHER, bad=bad))
        named = {"type": "function", "function": {"name": "bad"}}
        forced = request(tools=tools(weather=WEATHER, bad=bad), tool_choice=named)
        began_s = time.thread_time()
        for body in (strict, forced):
            with pytest.raises(PagemillError) as caught:
                check_form(body)
            assert (caught.value.status, caught.value.param) == (400, param)
            assert says in caught.value.message
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.5, "the refusal must be quick"


@pytest.mark.parametrize("syntax", ["hermes", "qwen3-coder"])
def test_a_forced_choice_among_several_tools_is_not_refused_for_the_schema_of_one(syntax: str) -> None:
    bad = {"type": "object", "properties": {"a": {"contains": {"type": "integer"}}}, "anyOf": [{}]}
    body = request(tools=tools(weather=WEATHER, bad=bad), tool_choice="required")
    check_form(body)
    form = call_syntax(syntax, "")
    matcher_of(prescribed(body, form, "", ""))
    assert unheld_fields(body, form) == ["tools[1].function.parameters"]
    assert unheld_fields(request(tools=tools(weather=WEATHER, word=WORD), tool_choice="required"), form) == []
    with pytest.raises(PagemillError, match="contains"):
        check_form(request(tools=tools(weather=WEATHER) + tools(strict=True, bad=bad), tool_choice="required"))
    with pytest.raises(PagemillError, match="contains"):
        check_form(request(tools=tools(bad=bad, worse={**bad, "title": "x"}), tool_choice="required"))


@pytest.mark.slow
def test_the_cost_of_512_strict_tools_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    # Slow processors take more than the limit.
    generous = msgspec.structs.replace(check.LIMITS, cpu_limit_s=10.0, wall_limit_s=60.0)
    monkeypatch.setattr(check.CHECKS, "_limits", generous)
    took_s: dict[int, list[float]] = {128: [], 512: []}
    for try_ in range(10):
        if try_ >= 3 and min(took_s[512]) < 12 * min(took_s[128]):
            break  # other processes use the machine at the other tries
        for number in took_s:
            schemas = {f"f{index}": {**WEATHER, "description": f"{try_} {index}"} for index in range(number)}
            strict = request(tools=tools(strict=True, **schemas))
            began_s = time.monotonic()
            check_form(strict)
            matcher_of(prescribed(strict, call_syntax("hermes", ""), "", ""))
            took_s[number].append(time.monotonic() - began_s)
    assert min(took_s[512]) < 12 * min(took_s[128]), (
        "four times as many tools; a quadratic cost would be sixteen times as high"
    )


def test_an_error_in_allowed_tools_is_reported_with_its_path_in_the_request() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["a"]}
    named = [{"type": "function", "function": {"name": "bad"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    with pytest.raises(PagemillError) as caught:
        check_form(request(tools=tools(bad=bad, **SCHEMAS)[::-1], tool_choice=choice))
    assert caught.value.param == f"tools[{len(SCHEMAS)}].function.parameters"


def test_a_reasoning_object_equals_the_separate_fields() -> None:
    body = request(reasoning={"effort": "low", "max_tokens": 7})
    assert (body.template_kwargs, body.reasoning_budget) == ({"reasoning_effort": "low"}, 7)
    assert request(reasoning={"max_tokens": -1}).reasoning_budget is None


TEXTS: dict[str, Any] = {
    "by reference": ({"$ref": "#/$defs/t"}, "12"),
    "nullable": ({"type": ["string", "null"]}, "12"),
    "all of": ({"allOf": [{"$ref": "#/$defs/t"}], "description": "d"}, "12"),
    "listed": ({"enum": ["1", "2"]}, "2"),
    "constant": ({"const": "7"}, "7"),
    "any of": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
    "any of listed": ({"anyOf": [{"enum": ["1"]}, {"const": "true"}]}, "true"),
    "bounded": ({"$ref": "#/$defs/t", "maxLength": 3}, "123"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_arguments_that_are_texts_in_any_notation_stay_texts_in_qwen3_coders_format(name: str, strict: bool) -> None:
    schema, value = TEXTS[name]
    parameters = {"type": "object", "$defs": {"t": {"type": "string"}}, "properties": {"a": schema}, "required": ["a"]}
    body = request(tools=tools(strict=strict, f=parameters))
    said = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    forced = request(tools=body.tools, tool_choice="required")
    matcher = matcher_of(prescribed(forced, call_syntax("qwen3-coder", ""), "", ""))
    ids = [IDS["<tool_call>"], *Tokens()(said.removeprefix("<tool_call>"))]
    assert matcher.try_consume_tokens(ids) == len(ids)
    texts = {"f": text_properties(parameters)}
    parser = AnswerParser(AnswerFormat(tools="qwen3-coder", string_parameters=texts))
    written = "".join(each.text for each in [*parser.push(said), *parser.finish()] if isinstance(each, CallArguments))
    assert json.loads(written) == {"a": value}


@pytest.mark.parametrize("schema", [{}, {"type": "integer"}, {"type": ["string", "integer"]}, {"enum": ["a", 1]}, True])
def test_other_arguments_are_no_texts(schema: Any) -> None:
    assert text_properties({"properties": {"a": schema}}) == []


def test_schemas_of_unconstrained_tools_are_not_checked() -> None:
    check_form(request(tools=tools(bad={"type": 7})))
    named = {"type": "function", "function": {"name": "weather"}}
    check_schemas(request(tools=tools(bad={"type": 7}, weather=WEATHER), tool_choice=named))


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("pythonic", {"properties": {"a b": {}}}, '"a b" cannot be a keyword'),
        ("pythonic", {"anyOf": [{}]}, "one by one, which cannot enforce anyOf"),
        ("qwen3-coder", {"properties": {"a>": {}}}, "cannot be written in a tag"),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "cannot enforce format"),
    ],
)
def test_a_schema_that_the_models_format_cannot_express_is_refused_with_its_path(
    name: str, schema: Any, says: str
) -> None:
    with pytest.raises(PagemillError, match=says) as caught:
        prescribed(request(tools=tools(f=schema), tool_choice="required"), call_syntax(name, ""), "", "")
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("given", ["", "a=1", "b=true", "a=1, b=true", "a=1, c=null", "b=true, c=null", "c=null"])
def test_optional_arguments_of_a_pythonic_call_may_be_omitted(given: str) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}}
    syntax = call_syntax("pythonic", "")
    matcher = matcher_of(prescribed(request(tools=tools(now=schema), tool_choice="required"), syntax, "", ""))
    answer = spelled(f"[now({given})]")
    assert matcher.try_consume_tokens(answer) == len(answer)
    assert calls_of(read(f"[now({given})]", tools="pythonic"))[0][0] == "now"


def test_calls_of_a_parser_without_a_declared_syntax_cannot_be_forced() -> None:
    with pytest.raises(PagemillError, match="declares no syntax") as caught:
        prescribed(request(tools=ALL, tool_choice="required"), None, "", "")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "field",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"prediction": {"type": "content", "content": "Hi"}},
        {"safety_identifier": "a"},
        {"user": "a"},
        {"metadata": {"a": "b"}},
        {"prompt_cache_key": "a"},
        {"verbosity": "low"},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
    ],
)
def test_fields_that_agents_send_are_accepted(field: dict[str, Any]) -> None:
    request(**field)


def test_forced_calls_cannot_be_combined_with_beam_search() -> None:
    with pytest.raises(PagemillError) as caught:
        request(tools=ALL, tool_choice="required", use_beam_search=True, n=2, temperature=0)
    assert caught.value.param == "use_beam_search"


def test_surrogate_halves_in_calls_are_joined_or_replaced() -> None:
    events = read('[f(a="\\ud83d\\ude00", b="\\ud83d")]', tools="pythonic")
    assert calls_of(events) == [("f", {"a": "\U0001f600", "b": "\ufffd"})]
    json.dumps(calls_of(events), ensure_ascii=False).encode()
