"""Sends the simulator's traffic as real chats over HTTP; each conversation is a client that waits for its answers.

Tokens become words that the model's tokenizer turns into exactly one token each, in any context. Times are the
simulator's, multiplied by the slowdown of the engines; results are divided by it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
from peers.http_load import LoadError, parse_event

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_simulator.conversations import Conversation
from routers.catalogue import KEY, MODEL
from routers.prompts import bundle

NUM_WORDS = 4096
REQUEST_TIMEOUT_S = 300.0
MIDWAY_S = 0.5
"""Seconds after the middle conversation has begun, when streams are running."""


def words() -> list[str]:
    """Return words with a leading blank, each of which is one token after any other."""
    tokenizer = Tokenizer(bundle())
    try:
        texts = (tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size))
        plain = [text for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].islower()]
        plain = [text for text in plain if text[1:].isalpha()][:NUM_WORDS]
        whole = tokenizer.encode("".join(plain), add_special_tokens=False)
    finally:
        tokenizer.close()
    if len(whole) != len(plain):
        raise RuntimeError(f"{len(plain)} words became {len(whole)} tokens")
    return plain


@dataclass
class Reported:
    """The results of all requests of one run, in milliseconds of the engines' own time."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    faulty_urls: list[str] = field(default_factory=list)
    """The URL of each fault."""


class Chats:
    def __init__(self, urls: Sequence[str], vocabulary: Sequence[str], slowdown: float) -> None:
        """Prepare the conversations. `urls`: assigned to conversations in turn."""
        self._urls = urls
        self._vocabulary = vocabulary
        self._slowdown = slowdown

    def run(self, traffic: Sequence[Conversation], seed: int, midway: Callable[[], None] = lambda: None) -> Reported:
        """Run every conversation to its end. Other seeds use other words. `midway` is called when half have begun."""
        vocabulary = random.Random(seed).sample(self._vocabulary, len(self._vocabulary))
        return asyncio.run(self._run(traffic, vocabulary, midway))

    async def _run(
        self, traffic: Sequence[Conversation], vocabulary: list[str], midway: Callable[[], None]
    ) -> Reported:
        reported = Reported()
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Authorization": f"Bearer {KEY}"},
                read_bufsize=2**20,
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for number, conversation in enumerate(traffic):
                url = self._urls[number % len(self._urls)]
                group.create_task(self._talk(session, url, conversation, vocabulary, reported))
            half_s = sorted(conversation.start_s for conversation in traffic)[len(traffic) // 2]
            await asyncio.sleep(half_s * self._slowdown + MIDWAY_S)
            midway()
        return reported

    async def _talk(
        self,
        session: aiohttp.ClientSession,
        url: str,
        conversation: Conversation,
        vocabulary: list[str],
        reported: Reported,
    ) -> None:
        def text(token_ids: Sequence[int]) -> str:
            return "".join(vocabulary[token_id % len(vocabulary)] for token_id in token_ids)

        await asyncio.sleep(conversation.start_s * self._slowdown)
        messages: list[dict[str, str]] = []
        if conversation.prefix and conversation.prefix_is_system:
            messages.append({"role": "system", "content": text(conversation.prefix)})
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.pause_s * self._slowdown)
            question = conversation.user_token_ids if number == 0 else turn.token_ids
            messages.append({"role": "user", "content": text(question)})
            try:
                answer = await self._ask(session, url, messages, turn.num_output_tokens, reported)
            except (aiohttp.ClientError, TimeoutError, OSError, LoadError, ValueError) as error:
                reported.faults.append(f"{type(error).__name__}: {error}"[:200])
                reported.faulty_urls.append(url)
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        url: str,
        messages: list[dict[str, str]],
        num_tokens: int,
        reported: Reported,
    ) -> str:
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first_s, pieces, usage = 0.0, [], None
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise LoadError(f"HTTP {response.status}: {(await response.text())[:120]}")
            async for line in response.content:
                event = parse_event(line)
                if event is None:
                    continue
                if event.get("choices"):
                    first_s = first_s or time.perf_counter()
                    pieces.append(event["choices"][0]["delta"].get("content") or "")
                usage = event.get("usage") or usage
        if usage is None or usage["completion_tokens"] != num_tokens:
            raise LoadError(f"an answer of {usage and usage['completion_tokens']} tokens, not {num_tokens}")
        end_s = time.perf_counter()
        reported.ttft_ms.append((first_s - start) * 1000 / self._slowdown)
        if num_tokens > 1:
            reported.tpot_ms.append((end_s - first_s) * 1000 / self._slowdown / (num_tokens - 1))
        reported.num_prompt_tokens += usage["prompt_tokens"]
        reported.num_cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # The simulated device generates any character, also those that HTTP servers refuse.
        return "".join(pieces).replace("\0", "")
