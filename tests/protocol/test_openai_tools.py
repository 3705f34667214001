"""Chat requests with tools: accepted and refused values, and the input of the template."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from byte_bundle import byte_bundle

from pagemill_api.answers import registry
from pagemill_api.answers.events import CallArguments, CallBegin
from pagemill_api.answers.formats.hermes import HermesParser
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.answers.registry import ToolFormat, tool_formats
from pagemill_api.openai import prepare
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest, TokenizeRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest

USER = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
NATIVE = "{{ tools | tojson if tools }}" + PLAIN.replace(
    "{{ m.content }}",
    ("{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}"),
)


AUTO = ParserSettings()


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


@pytest.fixture
def tokenizer_with() -> Iterator[Callable[[str], Tokenizer]]:
    """Return a function that makes a byte tokenizer with this chat template."""
    made: dict[str, Tokenizer] = {}
    yield lambda template: made.setdefault(template, Tokenizer(byte_bundle(template)))
    for tokenizer in made.values():
        tokenizer.close()


@pytest.fixture
def prepared(tokenizer_with: Callable[[str], Tokenizer]) -> Callable[..., tuple[str, GenerateRequest]]:
    """Return a function that prepares a chat and returns its prompt and the engine's request."""

    def prepare_with(template: str, parsers: ParserSettings = AUTO, **fields: Any) -> tuple[str, GenerateRequest]:
        tokenizer = tokenizer_with(template)
        request = prepare.prepare_chat(
            parse_body(raw(**fields), ChatCompletionRequest),
            tokenizer,
            max_model_len=4096,
            request_id="r",
            created_unix_s=0,
            parsers=parsers,
        )
        return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False), request

    return prepare_with


def test_a_template_that_supports_tools_gets_tools_and_arguments_as_objects(prepared: Any) -> None:
    text, request = prepared(NATIVE, tools=[WEATHER], messages=[USER, ASKED, RESULT])
    assert text.startswith(json.dumps([WEATHER]))
    assert text.endswith('<user>hi<assistant><tool_call>{"city": "Rome"}<tool>sunny<assistant>')
    assert request.answer_format.tools == "hermes"
    assert not request.sampling.skip_special_tokens, "markers may be special tokens"


def test_templates_that_concatenate_arguments_get_json_text(prepared: Any) -> None:
    template = PLAIN.replace(
        "{{ m.content }}", "{{ m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '') }}"
    )
    text, _ = prepared(template + "{# tools <tool_call> #}", messages=[USER, ASKED, RESULT])
    assert text == '<user>hi<assistant>{"city": "Rome"}<tool>sunny<assistant>'


def test_without_template_support_tools_are_in_the_system_message_and_the_log_says_why(
    prepared: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            text, request = prepared(PLAIN + "{# once #}", tools=[WEATHER], messages=[USER, ASKED, RESULT, RESULT])
    assert text.startswith("<system># Tools")
    assert json.dumps(WEATHER) in text
    assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><user>' in text
    assert text.count("<user>") == 2, "neighbouring results must be one message"
    assert request.answer_format.tools == "hermes"
    assert [("renders no tools" in record.getMessage()) for record in caplog.records] == [True]


@pytest.mark.parametrize("name", list(tool_formats()))
def test_tools_are_described_in_the_format_of_the_parser_of_the_calls(prepared: Any, name: str) -> None:
    parsers = ParserSettings(tools=name)
    text, request = prepared(PLAIN + "{# " + name + " #}", parsers, tools=[WEATHER], messages=[USER, ASKED, USER])
    described, history = text.split("<user>hi<assistant>", 1)
    assert json.dumps(WEATHER) in described
    example = described.split("arguments as JSON:\n")[1]
    for written, expected in (
        (example, ("NAME", {"KEY": "VALUE"})),
        (history.removesuffix("<user>hi<assistant>"), ("weather", {"city": "Rome"})),
    ):
        parser = AnswerParser(request.answer_format)
        events = [*parser.push(written), *parser.finish()]
        (begin, *arguments) = [each for each in events if isinstance(each, CallBegin | CallArguments)]
        assert (begin.name, json.loads("".join(each.text for each in arguments))) == expected
    assert request.answer_format.tools == name


def test_a_parser_without_a_declared_syntax_refuses_tools_if_the_template_renders_none(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {**tool_formats(), "foreign": ToolFormat("foreign", lambda _: HermesParser(), "^never$")}
    monkeypatch.setattr(registry, "tool_formats", lambda: foreign)
    with pytest.raises(PagemillError, match="declares no syntax") as caught:
        prepared(PLAIN + "{# foreign #}", ParserSettings(tools="foreign"), tools=[WEATHER])
    assert caught.value.param == "tools"


def test_a_template_that_refuses_system_messages_gets_the_tools_in_the_first_user_message(prepared: Any) -> None:
    text, _ = prepared(PLAIN + "{# System role not supported #}", tools=[WEATHER])
    assert text.startswith("<user># Tools")
    assert text.endswith("\n\nhi<assistant>")


def test_with_tool_choice_none_tools_are_not_rendered(prepared: Any) -> None:
    text, request = prepared(NATIVE, tools=[WEATHER], tool_choice="none")
    assert text == "<user>hi<assistant>"
    assert request.answer_format is None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("tools <tool_call> </think>", "hermes", "think"),
        ("tools <tool_call><function=f><parameter=p>", "qwen3-coder", ""),
        ("tools [TOOL_CALLS] [THINK] [/THINK]", "mistral", "magistral"),
        ("tools <tool_calls> </think> <answer> </answer>", "hunyuan", "hunyuan"),
        ("tools <tool_call> </think> <response> </response>", "hermes", "ernie"),
        ("tools <|channel|>", "harmony", "harmony"),
        ("tools <｜tool▁calls▁begin｜>", "deepseek", ""),
        ("tools [func(a=1)]", "pythonic", ""),
        ('tools {"name": function name, "parameters"', "llama3-json", ""),
    ],
)
def test_the_parsers_are_derived_from_the_template(prepared: Any, template: str, tools: str, reasoning: str) -> None:
    _, request = prepared("{% raw %}" + template + "{% endraw %}", tools=[WEATHER])
    assert (request.answer_format.tools, request.answer_format.reasoning) == (tools, reasoning)


def test_settings_override_the_derived_parsers(prepared: Any) -> None:
    _, request = prepared(NATIVE, ParserSettings("mistral", "think"), tools=[WEATHER])
    assert (request.answer_format.tools, request.answer_format.reasoning) == ("mistral", "think")
    with pytest.raises(PagemillError, match="toolCallParser"):
        prepared(NATIVE, ParserSettings(tools="none"), tools=[WEATHER])


def test_an_unknown_parser_is_refused_with_the_list_of_parsers(prepared: Any) -> None:
    with pytest.raises(PagemillError, match=r"no parser 'x'.*auto, none, harmony, deepseek"):
        prepared(NATIVE, ParserSettings("x"), tools=[WEATHER])


def test_reasoning_is_open_if_the_prompt_ends_with_its_start_marker(prepared: Any) -> None:
    template = PLAIN + "{{ '<think>\n' if enable_thinking is not defined or enable_thinking }}{# </think> #}"
    _, request = prepared(template)
    assert request.answer_format.starts_in_reasoning
    _, request = prepared(template, reasoning_effort="none")
    assert not request.answer_format.starts_in_reasoning


def test_reasoning_effort_and_verbosity_are_template_variables(prepared: Any) -> None:
    template = "{{ reasoning_effort }}/{{ verbosity }}"
    text, _ = prepared(template, reasoning_effort="low", verbosity="high")
    assert text == "low/high"
    text, _ = prepared(template, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert text == "high/"


def test_tokenize_counts_the_prompt_with_its_tools(tokenizer_with: Callable[[str], Tokenizer], prepared: Any) -> None:
    _, request = prepared(NATIVE, tools=[WEATHER])
    body = parse_body(raw(tools=[WEATHER]), TokenizeRequest)
    assert prepare.tokenize(body, tokenizer_with(NATIVE), 4096) == request.prompt_token_ids


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_with_allowed_tools_the_model_sees_no_others(mode: str) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    request = parse_body(raw(tools=[WEATHER, clock], tool_choice=allowing(mode, "clock")), ChatCompletionRequest)
    assert request.prompt_tools == [clock]
    assert request.names_function == ""
    assert request.forces_calls == (mode == "required")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER] * 10_000}, "tools", "10000 entries; at most 512"),
        ({"tools": {}}, "tools", "a list of functions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", '"web_search" is not supported'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "got null"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", '"a b"'),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name", "Use 1 to 128"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "Two tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
            "tools[0].function.parameters",
            "a JSON schema",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", '"sometimes"'),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
            '"other", which is not among',
        ),
        (
            {"tools": [WEATHER], "tool_choice": allowing("required", "weather", "other")},
            "tool_choice.allowed_tools.tools",
            '"other", which is not among',
        ),
        (
            {"tools": [WEATHER], "tool_choice": allowing("never", "weather")},
            "tool_choice.allowed_tools.mode",
            '"auto" or "required"',
        ),
        ({"tools": [WEATHER], "tool_choice": allowing("auto")}, "tool_choice.allowed_tools.tools", "1 to 512"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "-1"),
        ({"reasoning": {"max_tokens": 5}, "thinking_token_budget": 6}, "reasoning.max_tokens", "differ"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort", "differ"),
        ({"messages": [USER, RESULT]}, "messages[1].tool_call_id", '"c1"'),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "needs `tool_call_id`"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "role user"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]},
            "messages[0].tool_calls[0].id",
            "got 5",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of"),
        ({"functions": [{}]}, "functions", "send `tools`"),
    ],
)
def test_invalid_tools_are_refused_at_once_with_field_value_and_remedy(
    fields: dict[str, Any], param: str, says: str
) -> None:
    body = raw(**fields)
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        with pytest.raises(PagemillError) as caught:
            parse_body(body, ChatCompletionRequest)
        took_s.append(time.thread_time() - started_s)
    started_s = time.thread_time()
    json.loads(body)
    assert min(took_s) < 0.05 + time.thread_time() - started_s, "the refusal must be quick"
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message
