"""Tokenizers that the gateway no longer needs are removed at once if no request uses them, otherwise afterwards."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import psutil
from waiting import eventually

from pagemill_gateway.discovery.bundles import Bundles

MESSAGES = [{"role": "user", "content": "hi"}]


def workers() -> set[int]:
    """Return the template processes of this process."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if "template_worker" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


NEEDS_PROCESS = "{% macro text(message) %}{{ message.content }}{% endmacro %}{{ text(messages[0]) }}"
"""A template that does more than join texts."""


async def test_a_removed_tokenizer_stays_usable_for_its_users_and_then_leaves_no_process(engines) -> None:
    engine, before = engines[0], workers()
    async with aiohttp.ClientSession() as session:
        bundles = Bundles(session)
        await bundles.fetch(engine.bundle_digest, engine.url, "engine-secret")
        tokenizer = await bundles.tokenizer(engine.bundle_digest, NEEDS_PROCESS)
        rendered = await asyncio.to_thread(tokenizer.render_chat, MESSAGES)
        await eventually(lambda: not bundles._warm_ups)
        own = workers() - before
        assert own
        bundles.forget_all_but(set(), set())
        assert engine.bundle_digest not in bundles
        assert workers() - before == own
        assert await asyncio.to_thread(tokenizer.render_chat, MESSAGES) == rendered
        del tokenizer
        await eventually(lambda: workers() == before)
        await bundles.close()


async def test_closing_ends_every_template_process(engines) -> None:
    engine, before = engines[0], workers()
    async with aiohttp.ClientSession() as session:
        bundles = Bundles(session)
        await bundles.fetch(engine.bundle_digest, engine.url, "engine-secret")
        tokenizer = await bundles.tokenizer(engine.bundle_digest, None)
        await bundles.close()
    assert workers() == before
    assert tokenizer.encode("a")
