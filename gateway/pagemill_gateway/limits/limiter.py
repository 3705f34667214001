"""Every request's way through its caller's limits: reserved before it is routed, settled when it is over.

What is reserved is the prompt and a guess at the answer; what is charged in the end is what was really used, however
the request ended. Who counts is a `Store`; callers without limits never reach it.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pagemill_gateway.limits.caller import Caller
from pagemill_gateway.limits.estimate import AnswerLengths
from pagemill_gateway.limits.refusals import Headers, level_headers, refusal, too_large
from pagemill_gateway.limits.store import Answer, Ask, Store
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.relay.record import RequestRecord
from pagemill_protocol.generate import GenerateRequest

REMEMBER_REFUSAL_S = 1.0
"""A caller out of requests is refused again without parsing its body or asking the store."""


class Reservation:
    """Room for one request, given back by `settle`."""

    def __init__(self, settle: Callable[[RequestRecord, bool], object], headers: Headers) -> None:
        self._settle = settle
        self.headers = headers
        """What is left, for the answer."""

    def settle(self, record: RequestRecord, *, cut_off: bool) -> None:
        """The request is over. `cut_off`: it was not the platform that ended it early."""
        self._settle(record, cut_off)


class Counted:
    """A request that no engine is asked for, while it is answered."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        """What is left, for the answer."""
        self.num_tokens = 0
        """To charge when it is over."""


class Limiter:
    def __init__(self, store: Store, metrics: WorkerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._lengths = AnswerLengths()
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._refused: dict[tuple[str, int], tuple[float, Answer]] = {}
        """By account and its limit of requests: when the latest refusal was, and what was said."""

    def check(self, caller: Caller) -> None:
        """Refuse at once, before any work, who was refused for its number of requests a moment ago."""
        limit = caller.limits.requests_per_minute
        if limit is None or (latest := self._refused.get((caller.account, limit))) is None:
            return
        refused_at, answer = latest
        since_s = self._clock() - refused_at
        if since_s < min(REMEMBER_REFUSAL_S, answer.retry_after_s):
            self._metrics.limited("requests")
            raise refusal(caller.limits, answer._replace(retry_after_s=answer.retry_after_s - since_s), 0)
        del self._refused[caller.account, limit]

    async def reserve(self, caller: Caller, model: str, requests: Sequence[GenerateRequest]) -> Reservation:
        """Raises `PagemillError` 429."""
        if caller.limits.none:
            return Reservation(lambda record, cut_off: self._note(caller, record, cut_off), {})
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        limit = caller.limits.tokens_per_minute
        if limit is not None and num_prompt_tokens >= limit:
            self._metrics.limited("tokens")
            raise too_large(num_prompt_tokens, limit)
        lease, headers = await self._take(caller, num_prompt_tokens + self._expected(caller, model, requests))

        def settle(record: RequestRecord, cut_off: bool) -> None:
            self._store.settle(lease, self._note(caller, record, cut_off))

        return Reservation(settle, headers)

    @asynccontextmanager
    async def request(self, caller: Caller, num_tokens: int) -> AsyncIterator[Counted]:
        """Run the block as a request of about `num_tokens` that no engine is asked for. Raises `PagemillError` 429."""
        if caller.limits.none:
            yield Counted({})
            return
        lease, headers = await self._take(caller, num_tokens)
        counted = Counted(headers)
        try:
            yield counted
        finally:
            self._store.settle(lease, counted.num_tokens)

    async def _take(self, caller: Caller, num_tokens: int) -> tuple[str, Headers]:
        """The lease, and what is left. Raises `PagemillError` 429."""
        ask = Ask(caller.account, f"{self._process}-{next(self._numbers)}", num_tokens, caller.limits)
        asked_at = time.perf_counter()
        answer = await self._store.reserve(ask)
        self._metrics.reserved(time.perf_counter() - asked_at)
        if answer.refused is None:
            return ask.lease, level_headers(answer)
        self._metrics.limited(answer.refused)
        if answer.refused == "requests" and caller.limits.requests_per_minute is not None:
            self._refused[caller.account, caller.limits.requests_per_minute] = (self._clock(), answer)
        raise refusal(caller.limits, answer, num_tokens)

    def _expected(self, caller: Caller, model: str, requests: Sequence[GenerateRequest]) -> int:
        return sum(
            request.sampling.n * self._lengths.estimate(caller.account, model, request.sampling.max_tokens)
            for request in requests
        )

    def _note(self, caller: Caller, record: RequestRecord, cut_off: bool) -> int:
        """Tokens to charge, after they were counted for the tenant."""
        prompt, completion = used_tokens(record, cut_off)
        if caller.tenant:
            self._metrics.tenant_used(caller.tenant, prompt, completion)
        if completion and record.finished:
            self._lengths.observe(caller.account, record.model, -(-completion // record.num_choices))
        return prompt + completion


def used_tokens(record: RequestRecord, cut_off: bool) -> tuple[int, int]:
    """Tokens of prompt and answer.

    An answer that ended early counts as far as it got. One that failed before its first token cost its caller nothing,
    unless the caller went away itself: a prompt was computed for it.
    """
    if record.finished:
        return record.usage.prompt_tokens, record.usage.completion_tokens
    if record.num_delivered or (cut_off and record.endpoints):
        return record.prompt_tokens, record.num_delivered
    return 0, 0
