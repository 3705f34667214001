"""Plays conversations at a load: a fixed number of clients, arrivals at a rate, or the recorded times.

A closed loop keeps `concurrency` conversations running. In an open loop, conversations begin whether or not others have
ended, as users do. `exchange` is one request, `samples` what remains of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pagemill.bench.conversations import BenchConversation, BenchWorkload
from pagemill.bench.exchange import Exchanges, StreamedAnswer
from pagemill.bench.samples import BenchRun, BenchSample
from pagemill.bench.texts import TextLengths, words

PROGRESS_S = 0.5
LENGTH_WORDS = 256
MOST_ERRORS = 1000
"""A run ends after so many failed requests, since a server that refuses all answers fast."""


class Load(NamedTuple):
    """One of the first two, or neither: then conversations begin at their recorded times."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    """Mean number of conversations per second."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, below 1 has bursts, above 1 is more regular."""

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} client{'s' * (self.concurrency > 1)}"
        return "recorded times" if self.rate_per_s is None else f"{self.rate_per_s:g}/s"


class BenchTarget(NamedTuple):
    """The server and what is the same in all requests."""

    exchanges: Exchanges
    model: str
    default_output_tokens: int
    ignore_eos: bool
    temperature: float


Progress = Callable[[BenchRun, int], None]
"""Shows a run and the number of its requests that are running."""


async def text_lengths(target: BenchTarget) -> TextLengths:
    """Ask the server how many tokens words are. Raises `OSError` with the server's refusal."""
    counts = []
    for count in (1, 1 + LENGTH_WORDS):
        answer = await target.exchanges.ask(_body(target, [_user(words("lengths", count))], 1, {}))
        if answer.error:
            raise OSError(answer.error)
        counts.append(answer.usage.prompt_tokens)
    per_word = (counts[1] - counts[0]) / LENGTH_WORDS
    return TextLengths(per_word) if per_word > 0 else TextLengths()


async def run(
    target: BenchTarget, workload: BenchWorkload, load: Load, seed: int, max_seconds: float, show: Progress
) -> BenchRun:
    """Play all conversations, at most for so many seconds, and return what was measured."""
    player = _Player(target)
    done = player.run
    start, cpu_s = time.perf_counter(), time.process_time()
    shown = asyncio.create_task(_keep_showing(player, show))
    try:
        async with asyncio.timeout(max_seconds):
            if load.concurrency is not None:
                await player.closed_loop(workload, load.concurrency)
            else:
                await player.open_loop(workload, _beginnings(workload, load, seed))
    except TimeoutError:
        pass
    finally:
        shown.cancel()
    done.wall_s, done.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    show(done, 0)
    return done


async def _keep_showing(player: _Player, show: Progress) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        show(player.run, player.num_running)


def _beginnings(workload: BenchWorkload, load: Load, seed: int) -> Iterator[float]:
    """Yield the second at which each conversation begins."""
    if load.rate_per_s is None:
        yield from (each.at_s or 0.0 for each in workload.conversations)
        return
    source, at_s = random.Random(f"arrivals {seed}"), 0.0
    while True:
        yield at_s
        at_s += source.gammavariate(load.burstiness, 1 / (load.rate_per_s * load.burstiness))


class _Player:
    def __init__(self, target: BenchTarget) -> None:
        self.run = BenchRun()
        self.num_running = 0
        self._target = target
        self._start = time.perf_counter()

    async def closed_loop(self, workload: BenchWorkload, concurrency: int) -> None:
        waiting = iter(workload.conversations)

        async def client() -> None:
            for conversation in waiting:  # the clients share the iterator
                await self._play(conversation)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(workload.conversations))):
                group.create_task(client())

    async def open_loop(self, workload: BenchWorkload, beginnings: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for conversation, at_s in zip(workload.conversations, beginnings, strict=False):
                await asyncio.sleep(self._start + at_s - time.perf_counter())
                group.create_task(self._play(conversation))

    async def _play(self, conversation: BenchConversation) -> None:
        """Send the turns, each with all before; a conversation ends with its first failed request."""
        began = time.perf_counter()
        messages: list[Mapping[str, object]] = [*conversation.messages]
        if conversation.system:
            messages.append({"role": "system", "content": conversation.system})
        for turn in conversation.turns:
            if len(self.run.errors) >= MOST_ERRORS:
                return
            if turn.text:
                messages.append(_user(turn.text))
            await asyncio.sleep(began + turn.not_before_s - time.perf_counter())
            answer = await self._ask(_body(self._target, messages, turn.output_tokens, conversation.extra))
            if answer.error:
                self.run.errors.append(answer.error)
                return
            messages.append({"role": "assistant", "content": answer.text})

    async def _ask(self, body: bytes) -> StreamedAnswer:
        self.run.num_started += 1
        self.num_running += 1
        sent = time.perf_counter()
        try:
            answer = await self._target.exchanges.ask(body)
        finally:
            self.num_running -= 1
        if not answer.error:
            arrivals = answer.arrivals_s
            gaps = [late - early for early, late in itertools.pairwise(arrivals)]
            self.run.samples.append(
                BenchSample(
                    sent - self._start,
                    arrivals[0] - sent,
                    arrivals[-1] - sent,
                    gaps,
                    answer.usage.prompt_tokens,
                    answer.usage.completion_tokens,
                )
            )
        return answer


def _user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def _body(
    target: BenchTarget, messages: Sequence[Mapping[str, object]], output: int | None, extra: Mapping[str, object]
) -> bytes:
    tokens = output or target.default_output_tokens
    own = {
        "model": target.model,
        "messages": messages,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    settings = {"temperature": target.temperature} | ({"ignore_eos": True} if target.ignore_eos else {})
    return json.dumps(settings | {**extra} | own).encode()
