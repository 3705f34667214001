"""A closed loop of clients that compare each answer with the expected text: whole and streamed, greedy and seeded.

The expected texts are requested before anything is disturbed. The `openai` client never retries: that is the platform's
task. An outcome is `complete`, `wrong` (another text), `failed` (an error instead of an answer), `reported` (an error
event ended a stream) or `cut` (a stream ended without one).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, Literal, NamedTuple

import openai

REQUEST_TIMEOUT_S = 180.0
EXACT_DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model: {{source: "{model}", name: {name}}}
  engine: {{maxModelLen: 512, maxNumSeqs: 8, kvCacheMemory: 64Mi, dtype: float32, deterministic: true}}
  resources: {{gpus: 0}}
  replicas: {replicas}
"""
"""A deployment whose answers do not depend on what else runs."""
Outcome = Literal["complete", "wrong", "failed", "reported", "cut"]
QUESTIONS = (
    "Name three colours and a thing of each.",
    "What is the capital of France, and what is it known for?",
    "Count from one to twenty in words.",
    "Why is the sky blue? Explain it to a child.",
    "Write a short poem about rain on a tin roof.",
    "How do I boil an egg?",
    "Tell me about a lighthouse in a storm.",
    "What should I pack for a week at the sea?",
)


class Prompt(NamedTuple):
    text: str
    max_tokens: int
    temperature: float
    seed: int | None

    def fields(self, model: str) -> dict[str, Any]:
        """Return the fields of the request."""
        messages = [{"role": "user", "content": self.text}]
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.seed is not None:
            sampling["seed"] = self.seed
        return {"model": model, "messages": messages, **sampling, "extra_body": {"ignore_eos": True}}


def prompts(num_tokens: int) -> list[Prompt]:
    """Return the prompts; every second one is sampled at temperature 1 with a seed."""
    return [
        Prompt(text, num_tokens, temperature=float(number % 2), seed=number if number % 2 else None)
        for number, text in enumerate(QUESTIONS)
    ]


class Record(NamedTuple):
    outcome: Outcome
    streamed: bool
    seconds: float
    ttft_s: float | None
    detail: str
    sent_s: float
    """Monotonic time of sending."""
    longest_pause_s: float = 0.0
    """Longest time between sending and the first text, or between two pieces of text."""

    @property
    def first_s(self) -> float:
        """Seconds from sending to the first token, or to the whole answer if it was not streamed."""
        return self.ttft_s if self.ttft_s is not None else self.seconds


class ExactLoad:
    def __init__(self, url: str, model: str, num_workers: int, num_tokens: int) -> None:
        self.records: list[Record] = []
        self._model = model
        self._prompts = prompts(num_tokens)
        self._expected: dict[Prompt, str] = {}
        self._num_workers = num_workers
        self._stopping = False
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )

    async def learn(self) -> None:
        """Request every expected text, one at a time."""
        for prompt in self._prompts:
            answer = _Answer()
            await self._whole(prompt, answer)
            self._expected[prompt] = answer.text

    @property
    def prompts(self) -> list[Prompt]:
        return self._prompts

    async def ask(self, prompt: Prompt, *, streamed: bool) -> Record:
        """Send one request now, record it, and return the record."""
        record = await self._ask(prompt, streamed=streamed)
        self.records.append(record)
        return record

    async def run(self) -> None:
        """Send requests until `stop` is called; requests in flight then are finished."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_workers):
                group.create_task(self._work(number))

    def stop(self) -> None:
        self._stopping = True

    async def close(self) -> None:
        await self._client.close()

    def counts(self) -> dict[str, int]:
        """Return the number of records by form and outcome."""
        return dict(Counter(f"{'stream' if each.streamed else 'whole'} {each.outcome}" for each in self.records))

    @property
    def faults(self) -> list[Record]:
        return [each for each in self.records if each.outcome != "complete"]

    async def _work(self, number: int) -> None:
        turn = number
        while not self._stopping:
            prompt = self._prompts[turn % len(self._prompts)]
            # The form changes with every round over the prompts, so that each prompt is requested in both forms.
            streamed = (turn + turn // len(self._prompts)) % 2 == 0
            await self.ask(prompt, streamed=streamed)
            turn += self._num_workers + 1

    async def _ask(self, prompt: Prompt, *, streamed: bool) -> Record:
        start, answer = time.monotonic(), _Answer()
        try:
            await (self._streamed if streamed else self._whole)(prompt, answer)
            outcome: Outcome = "complete" if answer.finished else "cut"
            detail = answer.text[-80:]
        except openai.APIStatusError as error:
            outcome, detail = "failed", f"{error.status_code}: {error}"
        except openai.APIConnectionError as error:
            outcome, detail = ("cut" if answer.begun else "failed"), repr(error)
        except openai.APIError as error:
            outcome, detail = "reported", str(error)
        if outcome == "complete" and answer.text != self._expected[prompt]:
            outcome, detail = "wrong", f"{answer.text!r} in place of {self._expected[prompt]!r}"
        ttft_s = answer.first_s - start if answer.first_s is not None else None
        return Record(outcome, streamed, time.monotonic() - start, ttft_s, detail, start, answer.longest_pause_s)

    async def _whole(self, prompt: Prompt, answer: _Answer) -> None:
        body = await self._client.chat.completions.create(**prompt.fields(self._model))
        answer.text = body.choices[0].message.content or ""
        answer.finished = body.choices[0].finish_reason == "length"

    async def _streamed(self, prompt: Prompt, answer: _Answer) -> None:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await self._client.chat.completions.create(**prompt.fields(self._model), **options)
        answer.begun = True
        reason = None
        async for chunk in stream:
            if chunk.choices:
                answer.add(chunk.choices[0].delta.content or "")
                reason = chunk.choices[0].finish_reason or reason
            elif chunk.usage is not None:
                answer.finished = reason == "length" and chunk.usage.completion_tokens == prompt.max_tokens


class _Answer:
    """The part of an answer that has arrived, also if an error ends it."""

    def __init__(self) -> None:
        self.text = ""
        self.begun = False
        self.finished = False
        self.first_s: float | None = None
        self.longest_pause_s = 0.0
        self._latest_s = time.monotonic()

    def add(self, text: str) -> None:
        now_s = time.monotonic()
        if text and self.first_s is None:
            self.first_s = now_s
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._latest_s)
        self._latest_s = now_s
        self.text += text
