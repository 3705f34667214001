"""Plain programs of chat templates give the text of the template itself, or do not exist."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.text.template.plain_program import plain_program
from pagemill_api.text.template.plain_template import PlainTemplate
from pagemill_api.text.template.template_worker import make_environment

ENVIRONMENT = make_environment()
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRANCHES = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content | trim }}\n"
    "{% elif m.role == 'system' and not loop.last %}[S{% if loop.index0 < 1 %}0{% endif %}]{{ m.content }}"
    "{% else %}[A]{{ m.content ~ eos_token }}{% endif %}{% endfor %}  \n{% if tools is not none %}T{% endif %}"
)
LOOKS = (
    "{% for m in messages %}{% if 'x' in m.content or m.content == '' %}X{% elif m.name is defined %}{{ m.name }}"
    "{% elif m.content is string %}{{ m['content'] }}{% endif %}{% endfor %}{{ messages[-1].role }}"
)
PLAIN = {"chatml": CHATML, "branches": BRANCHES, "looks": LOOKS}
TEXTS = st.text(st.sampled_from(" \nxyz<|}{%é"), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.one_of(TEXTS, st.none())},
        optional={"name": TEXTS, "items": TEXTS},
    ),
    min_size=1,
    max_size=4,
)


def program(source: str) -> list[Any] | None:
    return plain_program(ENVIRONMENT.parse(source))


@pytest.mark.parametrize("source", PLAIN.values(), ids=PLAIN)
@given(MESSAGES, st.booleans(), st.one_of(st.none(), st.just([{"type": "function"}])))
def test_a_plain_program_gives_the_text_of_its_template(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any
) -> None:
    variables = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    found = program(source)
    assert found is not None
    text = PlainTemplate(found, 100_000).render(variables)
    try:
        expected = ENVIRONMENT.from_string(source).render(variables)
    except (TypeError, jinja2.UndefinedError):
        expected = None
    assert text is None or text == expected
    if all(isinstance(each["content"], str) for each in messages):
        assert text is not None


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = 1 %}{{ x }}",
        "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}",
        "{% for a in range(3) %}{% endfor %}",
        "{{ messages | length }}",
        "{{ messages | tojson }}",
        "{{ strftime_now('%Y') }}",
        "{{ raise_exception('no') }}",
        "{% macro a() %}{% endmacro %}{{ a() }}",
        "{{ messages[0].content.strip() }}",
        "{{ messages[0].content | trim('x') }}",
        "{{ messages[1:] }}",
        "{{ 'a' * 3 }}",
        "{% generation %}a{% endgeneration %}",
        "a{{ 'b' }}" * 300,
    ],
)
def test_a_template_that_does_more_than_join_texts_has_no_program(source: str) -> None:
    assert program(source) is None


@pytest.mark.parametrize("source", ["{{ range }}", "{{ messages[0].items }}", "{{ loop }}"])
def test_a_template_with_names_that_are_no_values_has_no_program(source: str) -> None:
    found = program(source)
    if found is not None:
        with pytest.raises(ValueError, match="no plain program"):
            PlainTemplate(found, 1000)


@pytest.mark.parametrize(
    "messages", [[{"content": None}], [{"content": ["part"]}], [{"content": 3}], [{}], [], [{"content": "x" * 600}]]
)
def test_values_outside_of_plain_chats_are_left_to_the_template(messages: Any) -> None:
    found = program("{{ messages[0].content + messages[0].content }}")
    assert found is not None
    assert PlainTemplate(found, 1000).render({"messages": messages}) is None


def test_a_program_never_exceeds_the_size_of_a_prompt() -> None:
    found = program("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert found is not None
    messages = [{"content": "x" * 100}] * 11
    assert PlainTemplate(found, 1000).render({"messages": messages}) is None
    assert PlainTemplate(found, 1100).render({"messages": messages}) == "x" * 1100


@pytest.mark.parametrize("found", [[["eval", "1"]], [["out"]], [["out", ["call", 1]]], [["if", ["const", 1]]], [5]])
def test_an_invalid_program_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="no plain program"):
        PlainTemplate(found, 1000)
