"""Sends load from outside the cluster: the real `openai` client, a few workers, whole and streamed answers alternately.

The client never retries, because that is the platform's task. Prompts are greedy, and their golden answers are
requested before the load starts, so that a retried or migrated request can be checked. The workers run on an event loop
in a thread of their own while the case changes the cluster.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai
from support.outcomes import Outcome, Record, Report
from support.waiting import until

PROMPTS = (
    "Name three colours.",
    "What is the capital of France?",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Write a short poem about rain.",
)
LONG_PROMPT = "Write a long story about a lighthouse keeper and his cat."
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Service:
    """Access to a model: the OpenAI base URL (with /v1), the API key and the model's name."""

    base_url: str
    api_key: str
    model: str = ""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0, timeout=REQUEST_TIMEOUT_S)

    def ask(self, prompt: str = PROMPTS[0], max_tokens: int = 24) -> str:
        """Return one greedy answer."""
        with self.client() as client:
            answer = client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0
            )
        return answer.choices[0].message.content or ""

    def models(self) -> list[str]:
        """Return the model names that clients see."""
        with self.client() as client:
            return [model.id for model in client.models.list()]


@dataclass
class Load:
    """A running load; `report` returns its requests so far."""

    service: Service
    workers: int
    max_tokens: int
    max_requests: int
    prompts: Sequence[str] = PROMPTS
    golden: dict[str, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    started_s: float = field(default_factory=time.monotonic)
    sent: int = 0

    def report(self) -> Report:
        return Report(list(self.records), time.monotonic() - self.started_s)

    def wait_for(self, more: int, timeout_s: float = 120) -> None:
        """Wait until that many more requests have ended, with any outcome."""
        wanted = len(self.records) + more
        until(f"{more} more requests ended", lambda: len(self.records) >= wanted, timeout_s=timeout_s)

    async def run(self) -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=self.service.base_url, api_key=self.service.api_key, max_retries=0, timeout=REQUEST_TIMEOUT_S
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self.workers):
                group.create_task(self._work(client, number))

    async def _work(self, client: openai.AsyncOpenAI, number: int) -> None:
        while not self.stopping.is_set() and self.sent < self.max_requests:
            turn = self.sent
            self.sent += 1
            prompt = self.prompts[turn % len(self.prompts)]
            self.records.append(await self._request(client, prompt, streamed=(turn + number) % 2 == 0))

    async def _request(self, client: openai.AsyncOpenAI, prompt: str, *, streamed: bool) -> Record:
        started = time.monotonic()
        answer = _Answer()
        try:
            await (self._streamed if streamed else self._whole)(client, prompt, answer)
            outcome: Outcome = "complete" if answer.finished else "cut"
            detail = "" if answer.finished else "the stream ended without a finish reason and usage"
        except Exception as error:
            outcome, detail = _failure(error, begun=answer.begun), f"{type(error).__name__}: {error}"
        golden = self.golden.get(prompt)
        if outcome == "complete" and golden is not None and answer.text != golden:
            outcome, detail = "wrong", f"golden: {golden!r}"
        elif golden is not None and not golden.startswith(answer.text):
            outcome, detail = "wrong", f"{detail}; golden: {golden!r}"
        seconds = time.monotonic() - started
        ttft = answer.first_s - started if answer.first_s is not None and streamed else None
        return Record(outcome, streamed, started, seconds, ttft, answer.longest_gap_s, answer.text, detail)

    async def _whole(self, client: openai.AsyncOpenAI, prompt: str, answer: _Answer) -> None:
        body = await client.chat.completions.create(
            model=self.service.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self.max_tokens,
            temperature=0,
        )
        answer.text = body.choices[0].message.content or ""
        answer.finished = body.choices[0].finish_reason in ("stop", "length")

    async def _streamed(self, client: openai.AsyncOpenAI, prompt: str, answer: _Answer) -> None:
        stream = await client.chat.completions.create(
            model=self.service.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer.begun = True
        reason = None
        async for chunk in stream:
            if chunk.choices:
                answer.add(chunk.choices[0].delta.content or "")
                reason = chunk.choices[0].finish_reason or reason
            answer.finished = reason in ("stop", "length") and chunk.usage is not None


@dataclass
class _Answer:
    """The part of an answer that has arrived, also if an error ends the answer."""

    text: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    begun: bool = False
    """Whether the stream's headers have arrived."""
    finished: bool = False

    def add(self, text: str) -> None:
        if not text:
            return
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        self.text += text


def _failure(error: Exception, *, begun: bool) -> Outcome:
    if isinstance(error, openai.APIStatusError):
        return "refused"
    if isinstance(error, openai.APIConnectionError) or not isinstance(error, openai.APIError):
        return "cut" if begun else "unreachable"
    # The client raises a bare APIError only for an error event inside a stream.
    return "reported"


@contextmanager
def long_answers(service: Service) -> Iterator[Load]:
    """Run one client that nearly always receives a long answer, so that any removed pod has one to finish."""
    with running_load(service, workers=1, max_tokens=200, warm_up=0, prompts=(LONG_PROMPT,)) as load:
        yield load


@contextmanager
def running_load(
    service: Service,
    *,
    workers: int = 3,
    max_tokens: int = 24,
    max_requests: int = 20_000,
    warm_up: int = 4,
    prompts: Sequence[str] = PROMPTS,
    golden: Mapping[str, str] | None = None,
) -> Iterator[Load]:
    """Send load to the service while the block runs; when the block ends, every request has ended.

    `golden` has the answers that an earlier load with the same token limits requested; otherwise they are requested
    first.
    """
    load = Load(service, workers, max_tokens, max_requests, prompts)
    load.golden.update(golden or {prompt: service.ask(prompt, max_tokens) for prompt in load.prompts})
    thread = threading.Thread(target=lambda: asyncio.run(load.run()), name="load", daemon=True)
    thread.start()
    try:
        load.wait_for(warm_up)
        yield load
    finally:
        load.stopping.set()
        thread.join(REQUEST_TIMEOUT_S * 2)
        print(f"load on {service.model}: {load.report().summary()}")
    assert not thread.is_alive(), "a request never ended"
