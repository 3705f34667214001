"""Sends the first question through the gateway, as a client would, and streams the answer to the screen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

QUESTION = "In one short sentence: what is the capital of France?"
MAX_TOKENS = 40
RETRY_S = 0.1
TIMEOUT = aiohttp.ClientTimeout(total=300, sock_connect=5)


class AnswerError(Exception):
    """The model did not answer; the message names the cause."""


class NoChatError(Exception):
    """The model serves and cannot chat, such as one that embeds or has no chat template; the message says why."""


@dataclass(frozen=True)
class FirstAnswer:
    text: str
    ttft_s: float
    """Time from the answered request to its first text."""
    total_s: float
    first_token_at_s: float
    """The time of the first text, by `time.time()`."""


async def ask(
    base_url: str, model: str, on_text: Callable[[str], None], *, api_key: str = "", patience_s: float = 15.0
) -> FirstAnswer:
    """Stream one answer, and return it. Raises `AnswerError`, or `NoChatError` for a model that cannot chat.

    Statuses 404 and 503 are retried for `patience_s`, because the gateway may not know the engines yet.
    """
    deadline_s = time.monotonic() + patience_s
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(trust_env=False, timeout=TIMEOUT, headers=headers) as session:
        while True:
            try:
                return await _ask_once(session, base_url, model, on_text)
            except _NotYet as error:
                if time.monotonic() > deadline_s:
                    raise AnswerError(str(error)) from None
                await asyncio.sleep(RETRY_S)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise AnswerError(f"{type(error).__name__}: {error}") from error


class _NotYet(Exception):
    """Status 503, or 404: the gateway does not know the model yet."""


async def _ask_once(
    session: aiohttp.ClientSession, base_url: str, model: str, on_text: Callable[[str], None]
) -> FirstAnswer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    began_s = time.monotonic()
    first_s = first_at_s = 0.0
    pieces: list[str] = []
    async with session.post(f"{base_url}/v1/chat/completions", json=body) as response:
        if response.status in (404, 503):
            raise _NotYet(_error_message(await response.read()))
        if response.status == 400:
            raise NoChatError(_error_message(await response.read()))
        if response.status != 200:
            raise AnswerError(f"{response.status}: {_error_message(await response.read())}")
        async for piece in _texts(response.content):
            if not pieces:
                first_s, first_at_s = time.monotonic(), time.time()
            pieces.append(piece)
            on_text(piece)
    if not pieces:
        raise AnswerError("the answer is empty")
    return FirstAnswer("".join(pieces), first_s - began_s, time.monotonic() - began_s, first_at_s)


async def _texts(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yield the texts of a stream of chat completion chunks."""
    async for line in content:
        data = line.decode("utf-8").strip().removeprefix("data:").strip()
        if not data or data == "[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise AnswerError(str(chunk["error"].get("message")))
        for choice in chunk.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                yield text


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
