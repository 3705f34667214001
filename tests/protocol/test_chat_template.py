"""Chat templates render the same text as in transformers, and no template or message can harm the server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import WAIT_LIMIT_S

from pagemill_api.sandbox.process import ProcessLimits
from pagemill_api.text.template.chat_template import ChatTemplate
from pagemill_models.sources import SourceError
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

LIMITS = ProcessLimits(cpu_limit_s=0.3, wall_limit_s=60.0, max_output_chars=100_000, memory_bytes=512 * 1024 * 1024)
HELLO = [{"role": "user", "content": "hello"}]

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}
{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system_message %}{% set content = '<<SYS>>' + system_message + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""
TOOLS = """
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=2) }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns = namespace(calls=0) %}
    {%- for call in message.tool_calls or [] %}
        {%- set ns.calls = ns.calls + 1 %}{{- call.function | tojson }}
    {%- endfor %}
    {{- message.content | trim ~ ns.calls }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- endfor %}
"""


@pytest.fixture
def template() -> Iterator[Callable[..., ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(source: str | None, limits: ProcessLimits = LIMITS, **fields: Any) -> ChatTemplate:
        fields = {"bos_token": "<s>", "eos_token": "</s>"} | fields
        bundle = TokenizerBundle(tokenizer_json="{}", chat_template=source, **fields)
        made.append(ChatTemplate(bundle, limits=limits))
        return made[-1]

    yield make
    for chat_template in made:
        chat_template.close()


def error_of(chat_template: ChatTemplate, messages: Any = HELLO, **options: Any) -> PagemillError:
    with pytest.raises(PagemillError) as refused:
        chat_template.render(messages, **options)
    assert refused.value.status == 400
    return refused.value


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi ü 😀"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "  Bye  "},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<&'ü>", "parameters": {}}}


@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_the_text_equals_that_of_transformers(template, source, tools):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = reference.render_jinja_template(
        [CONVERSATION], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert template(source).render(CONVERSATION, tools=tools) == expected[0]


def test_the_generation_prompt_can_be_omitted(template):
    chat = template(CHATML)
    assert chat.render(HELLO).endswith("assistant\n")
    assert chat.render(HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")


@pytest.mark.parametrize("ending", ["", " ", "\n", " mid", "<|im_end|>"])
def test_a_final_message_is_continued_at_its_end(template, ending):
    messages = [*HELLO, {"role": "assistant", "content": f"Sure{ending}"}]
    rendered = template(CHATML).render(messages, continue_final_message=True)
    assert rendered == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure{ending}"


def test_a_final_message_that_the_template_drops_cannot_be_continued(template):
    error = error_of(template("{{ messages[0].content }}"), HELLO * 2, continue_final_message=True)
    assert error.param == "continue_final_message"


def test_content_parts_are_joined_into_one_text(template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb\nc"


def test_missing_content_is_empty_text(template):
    messages = [{"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": None}]
    assert template("{% for m in messages %}[{{ m.content }}]{% endfor %}").render(messages) == "[][]"


def test_tool_arguments_reach_the_template_as_objects(template):
    calls = [{"function": {"name": "f", "arguments": '{"x": "ü<"}'}}, {"function": {"name": "g", "arguments": "{x"}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    rendered = template("{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}").render(
        messages
    )
    assert rendered == '{"x": "ü<"}"{x"'


def test_the_tool_template_is_used_for_requests_with_tools(template):
    chat = template("plain", tool_chat_template="tools")
    assert chat.render(HELLO) == chat.render(HELLO, tools=[]) == "plain"
    assert chat.render(HELLO, tools=[TOOL]) == "tools"


def test_extra_variables_reach_the_template(template):
    assert template("{{ enable_thinking }}").render(HELLO, template_kwargs={"enable_thinking": False}) == "False"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "bos_token", "range"]
)
def test_extra_variables_must_not_replace_those_of_the_server(template, name):
    assert error_of(template(CHATML), template_kwargs={name: 1}).param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("kwargs", [{"_x": 1}, {"a b": 1}, {"": 1}, {f"k{i}": 1 for i in range(33)}, ["x"]])
def test_extra_variables_are_bounded_and_have_names_of_variables(template, kwargs):
    assert error_of(template(CHATML), template_kwargs=kwargs).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 7}], "messages[1].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages"),
    ],
)
def test_invalid_messages_are_refused_by_path(template, messages, param):
    assert error_of(template(CHATML), messages).param == param


def test_a_model_without_a_template_is_reported(template):
    assert error_of(template(None)).code == "no_chat_template"


def test_the_templates_own_refusal_reaches_the_client(template):
    error = error_of(template(LLAMA2), [*HELLO, *HELLO])
    assert (error.param, "Roles must alternate" in error.message) == ("messages", True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "runs longer than 0.3 s"),
        ("{% set n = messages | length + 9 %}{{ n ** (n ** n) }}", "runs longer than 0.3 s"),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "runs longer than 0.3 s",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "longer than 100000 characters"),
        ("{% set n = messages | length %}{{ 'x' * (n * 9999999999) }}", "too much memory"),
        ("{{ messages | map('center', 9999999999) | list }}", "too much memory"),
        ("{{ messages.a.b }}", "has no attribute 'a'"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ unclosed", "does not compile"),
        ("{% generation %}", "does not compile"),
    ],
)
def test_a_hostile_or_broken_template_is_stopped_and_reported(template, source, message):
    chat = template(source)
    started = time.monotonic()
    error = error_of(chat)
    assert message in error.message
    assert (error.param, error.code) == ("messages", "chat_template_error")
    assert time.monotonic() - started < WAIT_LIMIT_S


def test_a_templates_error_shows_no_memory_address(template):
    error = error_of(template("{{ raise_exception(lipsum) }}"))
    assert error.message == "The chat template refuses these messages: <function generate_lorem_ipsum>"


def test_a_stopped_template_does_not_stop_the_next_request(template):
    chat = template("{% if messages | length > 1 %}{{ 9 ** (9 ** messages | length ** 9) }}{% endif %}fine")
    for _ in range(2):
        assert "runs longer" in error_of(chat, HELLO * 2).message
        assert chat.render(HELLO) == "fine"


def test_the_time_limit_applies_outside_the_main_thread(template):
    chat = template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    messages: list[str] = []
    thread = threading.Thread(target=lambda: messages.append(error_of(chat).message))
    thread.start()
    thread.join(timeout=WAIT_LIMIT_S)
    assert not thread.is_alive()
    assert "runs longer" in messages[0]


def test_many_threads_can_render_concurrently(template):
    chat = template("{{ messages[0].content * 3 }}")
    results: dict[int, str] = {}

    def render(number: int) -> None:
        results[number] = chat.render([{"role": "user", "content": f"{number};"}])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_LIMIT_S)
    assert results == {number: f"{number};" * 3 for number in range(24)}


def test_a_killed_worker_is_replaced(template):
    chat = template("fine")
    assert chat.render(HELLO) == "fine"
    pid = chat._idle[0]._process.pid
    os.kill(pid, signal.SIGKILL)
    assert chat.render(HELLO) == "fine"


def test_signals_to_the_terminals_process_group_leave_the_worker_running(template):
    chat = template("fine")
    assert chat.render(HELLO) == "fine"
    process = chat._idle[0]._process
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    assert chat.render(HELLO) == "fine"
    assert chat._idle[0]._process is process


def test_preparing_plain_templates_starts_no_process(template):
    chat = template(CHATML)
    chat.prepare()
    assert not chat._idle
    assert chat.render(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert not chat._idle, "no process is needed"


def test_preparing_starts_the_process_that_chats_will_need(template):
    chat = template(LLAMA2)
    chat.prepare()
    process = chat._idle[0]._process
    chat.render(HELLO)
    assert chat._idle[0]._process is process


@pytest.mark.parametrize("source", [None, "{{ 'a' * 10 ** 9 }}{% for"])
def test_preparing_succeeds_for_every_template(template, source):
    template(source).prepare()


def test_closing_leaves_no_process(template):
    chat = template("fine")
    chat.render(HELLO)
    process = chat._idle[0]._process
    chat.close()
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_garbage_collected_template_leaves_no_process():
    chat = ChatTemplate(TokenizerBundle(tokenizer_json="{}", chat_template="fine"), limits=LIMITS)
    chat.render(HELLO)
    process = chat._idle[0]._process
    del chat
    assert process.returncode is not None


def test_the_worker_has_no_secrets_of_the_server(template, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    chat = template("fine")
    chat.render(HELLO)
    with open(f"/proc/{chat._idle[0]._process.pid}/environ", "rb") as environment:
        assert b"secret" not in environment.read()


def test_an_override_replaces_the_models_templates():
    bundle = TokenizerBundle(tokenizer_json="{}", chat_template="own", tool_chat_template="tools")
    chat = ChatTemplate(bundle, override="mine", limits=LIMITS)
    assert chat.render(HELLO) == chat.render(HELLO, tools=[TOOL]) == "mine"
    chat.close()


@pytest.mark.parametrize("override", ["{% if %}", "{{ 10 ** (10 ** 8) }}", "{% endfor %}"])
def test_an_override_that_does_not_compile_is_refused_at_once(override):
    with pytest.raises(SourceError) as refused:
        ChatTemplate(TokenizerBundle(tokenizer_json="{}"), override=override, limits=LIMITS)
    assert refused.value.field == "model.chatTemplate"


@pytest.mark.model
def test_the_embedded_models_chat_is_rendered(smollm2):
    rendered = smollm2.render_chat(HELLO)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(rendered, add_special_tokens=False)
    assert ids.count(1) == 3
    assert smollm2.decode(ids, skip_special_tokens=False) == rendered


@pytest.mark.model
def test_rendering_costs_about_a_millisecond(smollm2):
    smollm2.render_chat(HELLO)
    took_s = []
    for _ in range(50):
        started_s = time.perf_counter()
        smollm2.render_chat(HELLO)
        took_s.append(time.perf_counter() - started_s)
    assert min(took_s) < 0.01
