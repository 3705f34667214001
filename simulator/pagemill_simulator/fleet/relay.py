"""Takes one simulated request through its attempts, as the gateway's relay does with a real one.

The brain and the accounting of attempts and engine failures are the gateway's own; frames, sockets and clients are left
out: what an engine has computed arrives a millisecond later. `fleet` creates the sites and reports when they end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pagemill_gateway.relay.relay import LEAST_TIMED_TOKENS
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.hashes import token_bytes
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams, is_low_priority
from pagemill_routing.attempts.attempt_failures import UpstreamFailure, record_failure
from pagemill_routing.attempts.attempts import Attempts
from pagemill_routing.attempts.engine_failures import EngineFailures
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import (
    Assignment,
    CompletedRequest,
    FailureKind,
    HashScheme,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    Target,
)
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.fleet.engines.engines import SimulatedEngine, TokenDelivery
from pagemill_simulator.fleet.outcome import Ending, FirstToken, Served
from pagemill_simulator.pod import NETWORK_S
from pagemill_simulator.workloads.request import SimRequest

MODEL = "sim"
KEY_TOKENS = 25
"""About a hundred characters, the length that `PrefixHash` uses."""
BYTES_PER_TOKEN = 4
"""Bytes of a request's body per token."""
PrefixChunks = Callable[[Sequence[int], int | None, HashScheme, str], tuple[bytes, ...]]
"""Returns the prefix chunks of a prompt and its session (`engines.EngineKind.prefix_chunks`)."""
OnFirstToken = Callable[[FirstToken], None]


@dataclass(slots=True, eq=False)
class PodRun:
    """One start of a pod, as far as requests are concerned."""

    pod_name: str
    engine: SimulatedEngine = field(init=False)
    requests: dict[str, RelayedRequest] = field(default_factory=dict)
    """Accepted requests that have not ended, by the engine's id for them."""
    accepts_requests: bool = True


class RelayedRequest(msgspec.Struct, eq=False):
    """One request in flight."""

    index: int
    """Index in the workload."""
    sim_request: SimRequest
    prompt: list[int]
    max_tokens: int
    arrival_s: float
    attempts: Attempts
    engine_failures: EngineFailures
    output: list[int] = []
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_cached_tokens: int = 0
    """Reported by the engine that began the answer."""
    weights_digest: str = ""
    was_accepted: bool = False
    """Whether an engine has accepted it."""
    is_accepted: bool = False
    """Whether the engine of the latest attempt has accepted it."""
    choice: Assignment | None = None
    """The endpoint of the latest attempt."""
    ended: asyncio.Future[FailureKind | PagemillError | None] | None = None
    """Resolved with the end of the latest attempt; None is success."""
    attempt_sent_s: float = 0.0
    attempt_first_s: float | None = None
    num_tokens_before: int = 0
    """Number of tokens before the latest attempt."""

    def served(self, ending: Ending) -> Served:
        ttft_ms = None if self.first_token_s is None else (self.first_token_s - self.arrival_s) * 1000
        tpot_ms = None
        if self.first_token_s is not None and len(self.output) > 1:
            tpot_ms = (self.last_token_s - self.first_token_s) * 1000 / (len(self.output) - 1)
        return Served(self.arrival_s, len(self.prompt), len(self.output), ending, ttft_ms, tpot_ms)


class SimulatedRelay:
    def __init__(
        self,
        brain: LocalBrain,
        events: Events,
        loop: EventsLoop,
        pod_runs: Mapping[str, PodRun],
        prefix_chunks: PrefixChunks,
        *,
        max_attempts: int,
        seed: int,
        on_empty: Callable[[PodRun], None],
        on_first_token: OnFirstToken | None = None,
    ) -> None:
        """`pod_runs`: the running pods by endpoint; `on_empty` is called when the last request has left a pod."""
        self._brain = brain
        self._events = events
        self._loop = loop
        self._pod_runs = pod_runs
        self._prefix_chunks = prefix_chunks
        self._max_attempts = max_attempts
        self._rng = random.Random(f"{seed} pauses")
        self._on_empty = on_empty
        self._on_first_token = on_first_token

    async def serve(self, index: int, sim_request: SimRequest, prompt: list[int]) -> tuple[Served, list[int]]:
        """Serve a request; return its end and its answer."""
        attempts = Attempts(self._max_attempts, uniform=self._rng.uniform)
        engine_failures = EngineFailures(self._rng.uniform)
        now, num_tokens = self._events.now_s, max(1, sim_request.num_output_tokens)
        request = RelayedRequest(index, sim_request, prompt, num_tokens, now, attempts, engine_failures)
        try:
            is_served = await self._serve(request)
        except PagemillError:
            is_served = False
        if is_served:
            return request.served("served"), request.output
        return request.served("lost" if request.was_accepted else "refused"), request.output

    def deliver(self, pod_run: PodRun, deliveries: Sequence[TokenDelivery]) -> None:
        """Deliver what an engine has computed."""
        now, requests = self._events.now_s, pod_run.requests
        for each in deliveries:
            request = requests.get(each.request_id)
            if request is None:
                continue
            if each.error:
                raise RuntimeError(f"a simulated engine failed request {request.index}: {each.error}")
            if request.attempt_first_s is None and each.token_ids:
                self._started(request, each.num_cached_tokens)
            request.output += each.token_ids
            request.last_token_s = now
            if each.is_last:
                del requests[each.request_id]
                self._end(request, None)
        if not requests:
            self._on_empty(pod_run)

    def cut(self, pod_run: PodRun, kind: FailureKind) -> None:
        """End the connections to a pod."""
        requests, pod_run.requests = pod_run.requests, {}
        for request in requests.values():
            self._end(request, kind)

    async def _serve(self, request: RelayedRequest) -> bool:
        """Return whether the request was answered completely. Raise `PagemillError` if it is refused."""
        ticket = QueueTicket(
            priority=request.sim_request.priority,
            num_bytes=len(request.prompt) * BYTES_PER_TOKEN,
            arrived_at=request.arrival_s,
            max_tokens=request.max_tokens,
        )
        target = await self._brain.find(request.sim_request.adapter or MODEL, ticket)
        room = target.max_model_len - len(request.prompt)
        if room < 1:
            return False
        request.max_tokens = min(request.max_tokens, room)
        routing_request = self._ask(request, target)
        retry: RetryContext | None = None
        while True:
            choice = await self._choose(request, target, routing_request, ticket, retry)
            failure = await self._attempt(request, choice)
            if failure is None:
                self._finished(request, choice, target)
                return True
            if isinstance(failure, PagemillError):
                self._brain.failed(choice, "request")
                raise failure
            self._brain.failed(choice, failure)
            if self._is_over(request, choice, failure):
                return False
            if pause_s := request.engine_failures.take_pause_s():
                await asyncio.sleep(pause_s)
            engine_failures, num_tokens = request.engine_failures.recorded, len(request.output)
            retry = RetryContext(
                choice.decision, choice.endpoint_id, failure, request.weights_digest, num_tokens, engine_failures
            )

    def _ask(self, request: RelayedRequest, target: Target) -> RoutingRequest:
        prompt, scheme, adapter_digest = request.prompt, target.scheme, target.adapter_digest
        prefix_chunks = self._prefix_chunks(prompt, request.sim_request.session, scheme, adapter_digest)
        num_system_tokens = request.sim_request.num_system_tokens
        key = token_bytes(prompt[num_system_tokens : num_system_tokens + KEY_TOKENS])
        return RoutingRequest(
            len(prompt), prefix_chunks, scheme.prefix_chunk_tokens, key, adapter_digest=adapter_digest
        )

    async def _choose(
        self,
        request: RelayedRequest,
        target: Target,
        routing_request: RoutingRequest,
        ticket: QueueTicket,
        retry: RetryContext | None,
    ) -> Assignment:
        attempts = request.attempts
        ticket = msgspec.structs.replace(
            ticket,
            max_tokens=request.max_tokens,
            waited_s=target.queued_s + attempts.queued_s,
            num_refusals=attempts.num_refusals,
            paid=attempts.count > 0,
        )
        choice = await self._brain.choose(target, attempts.tried, routing_request, ticket=ticket, retry=retry)
        if choice.queued_s:
            attempts.queued(choice.queued_s)
        if pause_s := attempts.pause_s(choice.endpoint_id):
            await asyncio.sleep(pause_s)
        attempts.record_choice(choice.endpoint_id)
        return choice

    async def _attempt(self, request: RelayedRequest, choice: Assignment) -> FailureKind | PagemillError | None:
        request.choice, request.attempt_first_s, request.num_tokens_before = choice, None, len(request.output)
        request.is_accepted = False
        request.ended, request.attempt_sent_s = self._loop.create_future(), self._events.now_s
        self._events.after(NETWORK_S, partial(self._enter, request, choice))
        return await request.ended

    def _enter(self, request: RelayedRequest, choice: Assignment) -> None:
        """Hand the request to the pod."""
        pod_run = self._pod_runs.get(choice.endpoint_id)
        if pod_run is None or not pod_run.accepts_requests:
            kind: FailureKind = "unreachable" if pod_run is None else "declined"
            self._events.after(NETWORK_S, partial(self._end, request, kind))
            return
        name = f"{request.index}-{request.attempts.count}"
        try:
            pod_run.engine.enter(_request(name, request), request.sim_request.session)
        except PagemillError as error:
            is_full = error.status in (429, 503)
            self._events.after(NETWORK_S, partial(self._end, request, "refused" if is_full else error))
            return
        pod_run.requests[name] = request
        request.was_accepted = request.is_accepted = True
        request.weights_digest = request.weights_digest or pod_run.engine.weights_digest
        self._events.after(NETWORK_S, partial(self._brain.accepted, choice))

    def _started(self, request: RelayedRequest, num_cached_tokens: int) -> None:
        choice, now = request.choice, self._events.now_s
        assert choice is not None
        ttft_ms = (now - request.attempt_sent_s) * 1000
        self._brain.started(choice, ttft_ms)
        request.attempt_first_s = now
        if request.first_token_s is not None:
            return
        request.first_token_s, request.num_cached_tokens = now, num_cached_tokens
        if self._on_first_token is not None:
            self._on_first_token(
                FirstToken(
                    len(request.prompt),
                    num_cached_tokens,
                    choice.predicted_cached_tokens,
                    choice.prefix_chunk_tokens,
                    ttft_ms,
                    choice.predicted_ttft_ms,
                )
            )

    def _end(self, request: RelayedRequest, how: FailureKind | PagemillError | None) -> None:
        """End the latest attempt."""
        assert request.ended is not None
        request.ended.set_result(how)

    def _finished(self, request: RelayedRequest, choice: Assignment, target: Target) -> None:
        num_tokens = len(request.output)
        self._brain.finished(choice, CompletedRequest(num_tokens, _pace_ms(request)))
        if is_low_priority(request.sim_request.priority):
            return
        served = request.served("served")
        self._brain.record_outcome(
            RequestOutcome(
                target.deployment,
                len(request.prompt),
                request.num_cached_tokens,
                num_tokens,
                served.ttft_ms,
                served.tpot_ms,
            )
        )

    def _is_over(self, request: RelayedRequest, choice: Assignment, kind: FailureKind) -> bool:
        """Record a failure; return whether the request may not be tried again."""
        if not request.output:
            request.weights_digest = ""
        record_failure(
            UpstreamFailure(kind, "failed"),
            choice,
            request.attempts,
            request.engine_failures,
            progressed=len(request.output) > request.num_tokens_before,
            is_accepted=request.is_accepted,
        )
        return request.attempts.exhausted


def _request(name: str, request: RelayedRequest) -> GenerateRequest:
    """Return the engine request for the missing part of the answer."""
    return GenerateRequest(
        request_id=name,
        model=MODEL,
        prompt_token_ids=request.prompt,
        adapter_digest=request.sim_request.adapter,
        sampling=SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, seed=request.index),
        resume=[ChoiceResume(0, list(request.output), 0)] if request.output else [],
        weights_digest=request.weights_digest if request.output else "",
        cached_tokens=request.num_cached_tokens if request.output else None,
        priority=request.sim_request.priority,
    )


def _pace_ms(request: RelayedRequest) -> float | None:
    """Return the mean time between tokens of the latest attempt, in milliseconds; None with too few tokens."""
    num_tokens = len(request.output) - request.num_tokens_before - 1
    if request.attempt_first_s is None or num_tokens < LEAST_TIMED_TOKENS:
        return None
    return (request.last_token_s - request.attempt_first_s) * 1000 / num_tokens
