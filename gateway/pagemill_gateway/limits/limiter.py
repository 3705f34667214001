"""Applies a caller's limits to a request: reserves before the request is routed, and settles when it is over.

Prompt and expected answer are reserved. If the caller has token limits, the answer cannot exceed what is reserved
(`allowance`). The tokens that were actually used are charged, however the request ended. A `Store` counts the use of
each account (`joint`: of the key's and of its models'); callers without limits do not reach it.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from pagemill_gateway.limits.allowance import Allowance, Reserved, TokenNeed
from pagemill_gateway.limits.joint import JointReservation, RefusedReservation, SingleReservation
from pagemill_gateway.limits.refusals import Headers, level_headers, refusal, too_large
from pagemill_gateway.limits.store import (
    Level,
    ReservationAnswer,
    ReservationRequest,
    Store,
    UseReport,
    amount_of,
    token_limits,
)
from pagemill_gateway.metrics.worker import WorkerMetrics
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.continuing import can_be_continued
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_routing.brain.interface import Target
from pagemill_servers.keys.caller import Caller, Charge

ARRIVING_RETRY_S = 1.0
REMEMBER_REFUSAL_S = 1.0
"""After a refusal for the number of requests, further requests are refused for this long without any work."""


LEAST_TOKENS = 256
"""The smallest expected length; also used while there are fewer than `MIN_SAMPLES` answers."""
MIN_SAMPLES = 8
NUM_SAMPLES = 64
QUANTILE = 0.9
MAX_TRACKED = 4096
"""Limit for the pairs of caller and model; the least recently used one is dropped."""


class AnswerLengths:
    """Estimates the length of an answer by a high quantile of the caller's recent answers from the model.

    Reserving `max_tokens` would block a budget for text that is rarely generated. The estimate is only the first part
    of the reservation (`allowance`). It has a minimum, so that requests of a caller with short answers are not admitted
    with a few tokens each and then cut off.
    """

    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()
        self._guesses: dict[tuple[str, str], int] = {}

    def expected(self, account: str, model: str) -> int:
        """Return the expected tokens of one sequence."""
        return max(LEAST_TOKENS, self._guesses.get((account, model), 0))

    def observe(self, account: str, model: str, num_tokens: int) -> None:
        whose = (account, model)
        samples = self._samples.setdefault(whose, deque(maxlen=NUM_SAMPLES))
        self._samples.move_to_end(whose)
        samples.append(num_tokens)
        if len(samples) >= MIN_SAMPLES:
            self._guesses[whose] = sorted(samples)[int(QUANTILE * (len(samples) - 1) + 0.5)]
        if len(self._samples) > MAX_TRACKED:
            forgotten, _ = self._samples.popitem(last=False)
            self._guesses.pop(forgotten, None)


class Reservation:
    """The reservation of one request, until `settle`."""

    def __init__(
        self,
        settle: Callable[[RequestRecord, bool], object],
        headers: Headers,
        allowances: Sequence[Allowance | None],
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`settled` waits until no process counts the reservation; `None` if nothing was reserved."""
        self._settled = settled
        self._settle: Callable[[RequestRecord, bool], object] | None = settle
        self.headers = headers
        """The rate-limit headers of the response."""
        self.allowances = allowances
        """The allowance of each engine request; `None` if the caller has no token limits."""

    def settle(self, record: RequestRecord, *, was_cut_short: bool) -> None:
        """End the reservation and charge the use. `was_cut_short`: the client ended the request early. Further calls do
        nothing."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(record, was_cut_short)

    async def end(self, record: RequestRecord) -> None:
        """End the reservation of a complete answer, before its client knows the end: its next request finds room."""
        record.finished = True
        self.settle(record, was_cut_short=False)
        if self._settled is not None:
            await self._settled()


class Arrival:
    """A request that is inside and whose tokens are not reserved yet."""

    def __init__(self, arriving: dict[str, int], account: str) -> None:
        """Count the request in `arriving`, unless `account` is empty."""
        self._arriving = arriving
        self._account = account
        if account:
            arriving[account] = arriving.get(account, 0) + 1

    def over(self) -> None:
        """Count the request no longer, because it is reserved or has ended. Further calls do nothing."""
        account, self._account = self._account, ""
        if not account:
            return
        self._arriving[account] -= 1
        if not self._arriving[account]:
            del self._arriving[account]


class Counted:
    """A request that the gateway answers without an engine."""

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        """What is left, for the answer."""
        self.num_tokens = 0
        """The tokens to charge at the end."""


class Limiter:
    def __init__(self, store: Store, metrics: WorkerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._lengths = AnswerLengths()
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._refused: dict[tuple[str, int], tuple[float, ReservationAnswer]] = {}
        """Time and answer of the latest refusal, by account and its limit of requests."""
        self._arriving: dict[str, int] = {}
        """The requests of each account with a limit of requests that are inside and not reserved yet."""

    async def use(self, accounts: Sequence[str]) -> UseReport:
        """Return what these accounts have used of their limits."""
        return await self._store.use(accounts)

    def arrive(self, caller: Caller) -> Arrival:
        """Let a request in before its body is read, until `Arrival.over`, which the caller must call at its end.

        Raises `PagemillError` 429 if as many requests of the caller are arriving as it may send in a minute: their
        bodies would occupy the gateway without ever being counted.
        """
        limit = caller.limits.requests_per_minute
        if limit is None:
            return Arrival(self._arriving, "")
        if self._arriving.get(caller.account, 0) >= limit:
            answer = ReservationAnswer("requests", ARRIVING_RETRY_S, Level(limit, 0, 0.0))
            raise self._refusal(caller.tenant, Charge(caller.account, caller.limits), answer)
        return Arrival(self._arriving, caller.account)

    def check(self, caller: Caller) -> None:
        """Raise `PagemillError` 429 if the caller was refused for its number of requests a moment ago."""
        limit = caller.limits.requests_per_minute
        if limit is None or (latest := self._refused.get((caller.account, limit))) is None:
            return
        refused_at, answer = latest
        since_s = self._clock() - refused_at
        if since_s < min(REMEMBER_REFUSAL_S, answer.retry_after_s):
            answer = answer._replace(retry_after_s=answer.retry_after_s - since_s)
            raise self._refusal(caller.tenant, Charge(caller.account, caller.limits), answer)
        del self._refused[caller.account, limit]

    async def reserve(self, caller: Caller, target: Target, requests: Sequence[GenerateRequest]) -> Reservation:
        """Reserve the requests' tokens and sequences. Raises `PagemillError` 429."""
        num_sequences = num_prompt_tokens = 0
        for request in requests:
            num_sequences += request.sampling.num_sequences
            num_prompt_tokens += len(request.prompt_token_ids)
        charges = charges_of(caller, target, requests[0].model)
        if not charges:
            return Reservation(
                lambda record, was_cut_short: self._note(
                    caller, record, used_tokens(record, was_cut_short), num_sequences
                ),
                {},
                [None] * len(requests),
            )
        self._check_size(caller.tenant, charges, num_prompt_tokens, num_sequences)
        needs = [self._need(caller, target, request) for request in requests]
        wanted = num_prompt_tokens + sum(need.first * need.request.sampling.num_sequences for need in needs)
        least = num_prompt_tokens + num_sequences
        made, answer = await self._take(caller.tenant, charges, wanted, num_sequences, least)
        reserved = None
        if any(token_limits(charge.limits) for charge in charges):
            reserved = Reserved(made.extend, num_prompt_tokens, answer.granted, needs)

        def settle(record: RequestRecord, was_cut_short: bool) -> None:
            used = used_tokens(record, was_cut_short, reserved.num_possible if reserved is not None else 0)
            ended = reserved is not None and reserved.ended_answer
            made.settle(self._note(caller, record, used, num_sequences, ended_by_limit=ended))
            if reserved is not None:
                reserved.close()

        allowances = reserved.allowances if reserved is not None else [None] * len(requests)
        return Reservation(settle, level_headers(answer), allowances, self._store.settled)

    @asynccontextmanager
    async def request(self, caller: Caller, charges: Sequence[Charge], num_tokens: int) -> AsyncIterator[Counted]:
        """Count the block as a request of about `num_tokens` without an engine. Raises `PagemillError` 429."""
        if not charges:
            yield Counted({})
            return
        made, answer = await self._take(caller.tenant, charges, num_tokens)
        counted = Counted(level_headers(answer))
        try:
            yield counted
        finally:
            made.settle(counted.num_tokens)
        await self._store.settled()

    async def _take(
        self, tenant: str, charges: Sequence[Charge], tokens: int, sequences: int = 1, least: int = 0
    ) -> tuple[SingleReservation | JointReservation, ReservationAnswer]:
        """Reserve in all accounts as many tokens as the smallest limit allows. Raises `PagemillError` 429."""
        if len(charges) == 1:
            charge = charges[0]
            ask = ReservationRequest(charge.account, self._new_lease(), tokens, charge.limits, sequences, least)
            made: SingleReservation | JointReservation = SingleReservation(self._store, charge, ask)
        else:
            tokens = min([tokens, *(bound for charge in charges for bound in token_limits(charge.limits))])
            asks = [
                ReservationRequest(charge.account, self._new_lease(), tokens, charge.limits, sequences, least)
                for charge in charges
            ]
            made = JointReservation(self._store, charges, asks)
        asked_at = time.perf_counter()
        answer = await made.reserve()
        self._metrics.reserved(time.perf_counter() - asked_at)
        if isinstance(answer, ReservationAnswer):
            return made, answer
        raise self._noted(tenant, answer)

    def _noted(self, tenant: str, refused: RefusedReservation) -> PagemillError:
        charge, ask, answer = refused
        limit = charge.limits.requests_per_minute
        if answer.refused == "requests" and limit is not None and not charge.model:
            self._refused[charge.account, limit] = (self._clock(), answer)
        return self._refusal(tenant, charge, answer, amount_of(ask), ask.sequences)

    def _refusal(
        self, tenant: str, charge: Charge, answer: ReservationAnswer, tokens: int = 0, sequences: int = 1
    ) -> PagemillError:
        """Count a refusal, and return its error."""
        assert answer.refused is not None
        self._metrics.limited(tenant, answer.refused, charge.model)
        return refusal(charge, answer, tokens, sequences)

    def _new_lease(self) -> str:
        return f"{self._process}-{next(self._numbers)}"

    def _check_size(self, tenant: str, charges: Sequence[Charge], num_prompt_tokens: int, num_sequences: int) -> None:
        """Raise `PagemillError` 429 for a request that the limits can never admit."""
        for charge in charges:
            if (found := too_large(charge, num_prompt_tokens, num_sequences)) is not None:
                reason, error = found
                self._metrics.limited(tenant, reason, charge.model)
                raise error

    def _need(self, caller: Caller, target: Target, request: GenerateRequest) -> TokenNeed:
        """Return the request's need. An answer without progress reports gets all its tokens at once."""
        sampling = request.sampling
        most = max(1, target.max_model_len - len(request.prompt_token_ids))
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens)
        if not can_be_continued(request):
            return TokenNeed(request, most, most)
        expected = max(self._lengths.expected(caller.account, target.model), sampling.min_tokens)
        return TokenNeed(request, min(most, expected), most)

    def _note(
        self,
        caller: Caller,
        record: RequestRecord,
        used: tuple[int, int],
        num_sequences: int,
        *,
        ended_by_limit: bool = False,
    ) -> int:
        """Count the used tokens in the metrics, and return the number to charge."""
        prompt, completion = used
        self._metrics.tenant_used(caller.tenant, record.model, prompt, completion)
        if ended_by_limit:
            record.ended_by_limit = True
            self._metrics.ended_by_limit(record.model)
        elif completion and record.finished:
            self._lengths.observe(caller.account, record.model, -(-completion // num_sequences))
        return prompt + completion


def charges_of(caller: Caller, target: Target, asked: str) -> list[Charge]:
    """Return what a request is charged to. `asked`: the name that the client sent: a model, an alias or an adapter."""
    return list(caller.charges((asked,) if target.adapter_digest else (asked, target.model)))


def used_tokens(record: RequestRecord, was_cut_short: bool, num_possible: int = 0) -> tuple[int, int]:
    """Return the used tokens of prompt and answer. `num_possible` is the upper bound of the generated tokens, or 0.

    An answer that ended early counts with its delivered tokens or, if the client ended it, with all that engines may
    have generated. A request that failed before its first token is free, unless the client disconnected: its prompt was
    computed.
    """
    if record.finished:
        return record.usage.prompt_tokens, record.usage.completion_tokens
    if was_cut_short and record.endpoints:
        return record.prompt_tokens, max(record.num_delivered, num_possible)
    if record.num_delivered:
        return record.prompt_tokens, record.num_delivered
    return 0, 0
