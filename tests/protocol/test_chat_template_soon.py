"""Chats are rendered for an event loop with the same texts and refusals as in a thread, without blocking the loop.

If rendering has to wait, the template says so, and the caller uses a thread, as `rendered` does here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from waiting import eventually

from pagemill_api.sandbox.process import MAX_INLINE_WRITE_BYTES, ProcessLimits
from pagemill_api.text.template.chat_template import ChatTemplate
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

LIMITS = ProcessLimits(cpu_limit_s=0.3, wall_limit_s=60.0, max_output_chars=100_000, memory_bytes=512 * 1024 * 1024)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG_WHEN_SEVERAL = "{% if messages | length > 1 %}" + ENDLESS + "{% endif %}fine"
BY_LAST = "{% set last = messages[-1] %}{{ last.content }}"
"""A template that needs its process: a plain one would be run without it."""


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def template() -> Iterator[Callable[[str], ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        made.append(ChatTemplate(TokenizerBundle(tokenizer_json="{}", chat_template=source), limits=LIMITS))
        return made[-1]

    yield make
    for chat_template in made:
        chat_template.close()


async def warm(chat: ChatTemplate) -> ChatTemplate:
    """Start the template's process and return the template."""
    await asyncio.to_thread(chat.render, said("hello"))
    assert len(chat._idle) == 1
    return chat


async def rendered(chat: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    text = await chat.render_inline(messages, **options)
    return text if text is not None else await asyncio.to_thread(chat.render, messages, **options)


def rendered_in_a_thread(chat: ChatTemplate) -> Callable[[list[dict[str, Any]]], Awaitable[str]]:
    return lambda messages: asyncio.to_thread(chat.render, messages)


async def settled(chat: ChatTemplate, num_idle: int) -> None:
    await eventually(lambda: len(chat._idle) == num_idle and chat._slots._value == 2)


async def test_the_text_is_the_same_without_a_thread(template, monkeypatch):
    chat = await warm(template("{{ messages[0].content * 3 }}"))

    def asked(*_: Any) -> None:
        raise AssertionError("a thread was used")

    monkeypatch.setattr(asyncio, "to_thread", asked)
    for number in range(20):
        assert await chat.render_inline(said(f"ü{number};")) == f"ü{number};" * 3
    await settled(chat, 1)


async def test_without_an_idle_process_a_thread_is_needed(template):
    chat = template(BY_LAST)
    assert await chat.render_inline(said("first")) is None
    await settled(chat, 0)
    assert await rendered(chat, said("first")) == "first"
    await settled(chat, 1)


async def test_concurrent_chats_get_their_own_texts(template):
    chat = await warm(template(BY_LAST))
    texts = [f"text {number}" for number in range(40)]
    assert await asyncio.gather(*(rendered(chat, said(text)) for text in texts)) == texts
    await settled(chat, len(chat._idle))


@pytest.mark.parametrize("num_chars", [MAX_INLINE_WRITE_BYTES // 2, MAX_INLINE_WRITE_BYTES * 2, 90_000])
async def test_long_messages_are_transferred_whole(template, num_chars):
    chat = await warm(template(BY_LAST))
    text = "x" * num_chars
    assert (await chat.render_inline(said(text)) is None) == (num_chars >= MAX_INLINE_WRITE_BYTES)
    assert await rendered(chat, said(text)) == text


async def test_a_short_message_may_produce_a_long_text(template):
    chat = await warm(template("{{ messages[0].content * 9999 }}"))
    assert await chat.render_inline(said("123456789 ")) == "123456789 " * 9999


async def test_the_event_loop_runs_while_a_template_is_stopped(template):
    chat = await warm(template(LONG_WHEN_SEVERAL))
    turns, ended = 0, asyncio.ensure_future(chat.render_inline(said("a") * 2))
    while not ended.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(PagemillError, match=r"runs longer than 0\.3 s"):
        await ended
    assert turns > 2
    assert await rendered(chat, said("a")) == "fine"
    await settled(chat, 1)


async def test_refusals_and_errors_are_reported_as_in_a_thread(template):
    chat = await warm(
        template("{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}")
    )
    with pytest.raises(PagemillError, match="refuses these messages: one only"):
        await chat.render_inline(said("a") * 2)
    with pytest.raises(PagemillError) as refused:
        await chat.render_inline([])
    assert refused.value.param == "messages"
    assert await chat.render_inline(said("still here")) == "still here"


async def test_a_template_that_does_not_compile_is_reported(template):
    chat = template("{{ unclosed")
    for _ in range(2):
        with pytest.raises(PagemillError, match="does not compile"):
            await rendered(chat, said("a"))


async def test_a_killed_process_is_replaced(template):
    chat = await warm(template(BY_LAST))
    os.kill(chat._idle[0]._process.pid, signal.SIGKILL)
    assert await chat.render_inline(said("again")) is None
    assert await rendered(chat, said("again")) == "again"
    await settled(chat, 1)


async def test_half_a_character_is_an_error_of_the_template(template):
    chat = await warm(template("{% if messages | length > 1 %}{{ '\\ud800' }}{% endif %}fine"))
    for render in (chat.render_inline, rendered_in_a_thread(chat)):
        with pytest.raises(PagemillError, match="not valid Unicode"):
            await render(said("a") * 2)
    await settled(chat, 1)


async def test_a_final_message_is_continued(template):
    chat = await warm(template(BY_LAST + "!"))
    messages = [*said("a"), {"role": "assistant", "content": "so far"}]
    assert await chat.render_inline(messages, continue_final_message=True) == "so far"


async def test_a_cancelled_chat_leaves_the_process_to_others(template):
    chat = await warm(template("{% for n in range(99999) %}{% endfor %}" + BY_LAST))
    process = chat._idle[0]
    leaving = asyncio.ensure_future(chat.render_inline(said("left")))
    await asyncio.sleep(0)
    assert not chat._idle
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await settled(chat, 1)
    assert chat._idle[0] is process
    assert await chat.render_inline(said("mine")) == "mine"


async def test_a_process_that_died_while_idle_is_not_used_again(template):
    chat = await warm(template(LONG_WHEN_SEVERAL))
    process = chat._idle[0]
    leaving = asyncio.ensure_future(chat.render_inline(said("left") * 2))
    await asyncio.sleep(0)
    leaving.cancel()
    await settled(chat, 0)
    await eventually(lambda: process._process.returncode is not None)
    assert await rendered(chat, said("mine")) == "fine"


@pytest.mark.model
async def test_rendering_blocks_the_loop_for_less_than_a_millisecond(smollm2):
    chat = smollm2.chat_template
    expected = await chat.render_inline(said("hello"))
    used_s = []
    for _ in range(50):
        before_s = time.thread_time()
        assert await chat.render_inline(said("hello")) == expected
        used_s.append(time.thread_time() - before_s)
    assert min(used_s) < 0.001
