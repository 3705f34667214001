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

from pagemill_gateway.admission.attempts import Attempts
from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.interface import (
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
from pagemill_gateway.relay.engine_failures import EngineFailures
from pagemill_gateway.relay.relay import LEAST_TIMED_TOKENS
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.hashes import token_bytes
from pagemill_protocol.sampling import SamplingParams, is_low_priority
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.fleet.engines import Delivery, Engine
from pagemill_simulator.fleet.outcome import Ending, Served
from pagemill_simulator.pod import NETWORK_S

MODEL = "sim"
KEY_TOKENS = 25
"""About a hundred characters, the length that `PrefixHash` uses."""
BYTES_PER_TOKEN = 4
"""Bytes of a request's body per token."""
PrefixChunks = Callable[[Sequence[int], int | None, HashScheme], tuple[bytes, ...]]
"""Returns the prefix chunks of a prompt and its session (`engines.EngineKind.prefix_chunks`)."""


@dataclass(slots=True, eq=False)
class Site:
    """One start of a pod, as far as requests are concerned."""

    pod_name: str
    engine: Engine = field(init=False)
    courses: dict[str, Course] = field(default_factory=dict)
    """Accepted requests that have not ended, by the engine's id for them."""
    takes_more: bool = True


@dataclass(slots=True, eq=False)
class Course:
    """One request in flight."""

    index: int
    """Index in the workload."""
    session: int | None
    prompt: list[int]
    max_tokens: int
    priority: int
    arrival_s: float
    attempts: Attempts
    engine_failures: EngineFailures
    output: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_cached_tokens: int = 0
    """Reported by the engine that began the answer."""
    weights_digest: str = ""
    was_accepted: bool = False
    """Whether an engine has accepted it."""
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


class Relay:
    def __init__(
        self,
        brain: LocalBrain,
        events: Events,
        loop: EventsLoop,
        sites: Mapping[str, Site],
        prefix_chunks: PrefixChunks,
        *,
        max_attempts: int,
        seed: int,
        on_empty: Callable[[Site], None],
    ) -> None:
        """`sites` are the running engines by endpoint; `on_empty` is called when the last request has left a site."""
        self._brain = brain
        self._events = events
        self._loop = loop
        self._sites = sites
        self._prefix_chunks = prefix_chunks
        self._max_attempts = max_attempts
        self._rng = random.Random(f"{seed} pauses")
        self._on_empty = on_empty

    async def serve(
        self, index: int, session: int | None, prompt: list[int], num_output_tokens: int, *, priority: int = 0
    ) -> tuple[Served, list[int]]:
        """Serve a request; return its end and its answer."""
        attempts = Attempts(self._max_attempts, uniform=self._rng.uniform)
        engine_failures = EngineFailures(self._rng.uniform)
        now, num_tokens = self._events.now_s, max(1, num_output_tokens)
        course = Course(index, session, prompt, num_tokens, priority, now, attempts, engine_failures)
        try:
            is_served = await self._serve(course)
        except PagemillError:
            is_served = False
        if is_served:
            return course.served("served"), course.output
        return course.served("lost" if course.was_accepted else "refused"), course.output

    def deliver(self, site: Site, deliveries: Sequence[Delivery]) -> None:
        """Deliver what an engine has computed."""
        now, courses = self._events.now_s, site.courses
        for each in deliveries:
            course = courses.get(each.request_id)
            if course is None:
                continue
            if each.error:
                raise RuntimeError(f"a simulated engine failed request {course.index}: {each.error}")
            if course.attempt_first_s is None and each.token_ids:
                self._started(course, each.num_cached_tokens)
            course.output += each.token_ids
            course.last_token_s = now
            if each.is_last:
                del courses[each.request_id]
                self._end(course, None)
        if not courses:
            self._on_empty(site)

    def cut(self, site: Site, kind: FailureKind) -> None:
        """End the connections to a site."""
        courses, site.courses = site.courses, {}
        for course in courses.values():
            self._end(course, kind)

    async def _serve(self, course: Course) -> bool:
        """Return whether the request was answered completely. Raise `PagemillError` if it is refused."""
        ticket = QueueTicket(
            priority=course.priority,
            num_bytes=len(course.prompt) * BYTES_PER_TOKEN,
            arrived_at=course.arrival_s,
            max_tokens=course.max_tokens,
        )
        target = await self._brain.find(MODEL, ticket)
        room = target.max_model_len - len(course.prompt)
        if room < 1:
            return False
        course.max_tokens = min(course.max_tokens, room)
        routing_request = self._ask(course, target)
        retry: RetryContext | None = None
        while True:
            choice = await self._choose(course, target, routing_request, ticket, retry)
            failure = await self._attempt(course, choice)
            if failure is None:
                self._finished(course, choice, target)
                return True
            if isinstance(failure, PagemillError):
                self._brain.failed(choice, "request")
                raise failure
            self._brain.failed(choice, failure)
            if self._is_over(course, choice, failure):
                return False
            if pause_s := course.engine_failures.take_pause_s():
                await asyncio.sleep(pause_s)
            engine_failures, num_tokens = course.engine_failures.recorded, len(course.output)
            retry = RetryContext(
                choice.decision, choice.endpoint_id, failure, course.weights_digest, num_tokens, engine_failures
            )

    def _ask(self, course: Course, target: Target) -> RoutingRequest:
        prefix_chunks = self._prefix_chunks(course.prompt, course.session, target.scheme)
        return RoutingRequest(
            len(course.prompt),
            prefix_chunks,
            target.scheme.prefix_chunk_tokens,
            token_bytes(course.prompt[:KEY_TOKENS]),
        )

    async def _choose(
        self,
        course: Course,
        target: Target,
        routing_request: RoutingRequest,
        ticket: QueueTicket,
        retry: RetryContext | None,
    ) -> Assignment:
        attempts = course.attempts
        ticket = ticket._replace(
            max_tokens=course.max_tokens,
            waited_s=target.queued_s + attempts.queued_s,
            num_refusals=attempts.num_refusals,
            paid=attempts.count > 0,
        )
        choice = await self._brain.choose(target, attempts.tried, routing_request, ticket=ticket, retry=retry)
        if choice.queued_s:
            attempts.queued(choice.queued_s)
        if pause_s := attempts.pause_s(choice.endpoint_id):
            await asyncio.sleep(pause_s)
        attempts.chose(choice.endpoint_id)
        return choice

    async def _attempt(self, course: Course, choice: Assignment) -> FailureKind | PagemillError | None:
        course.choice, course.attempt_first_s, course.num_tokens_before = choice, None, len(course.output)
        course.ended, course.attempt_sent_s = self._loop.create_future(), self._events.now_s
        self._events.after(NETWORK_S, partial(self._enter, course, choice))
        return await course.ended

    def _enter(self, course: Course, choice: Assignment) -> None:
        """Hand the request to the pod."""
        site = self._sites.get(choice.endpoint_id)
        if site is None or not site.takes_more:
            kind: FailureKind = "unreachable" if site is None else "declined"
            self._events.after(NETWORK_S, partial(self._end, course, kind))
            return
        name = f"{course.index}-{course.attempts.count}"
        try:
            site.engine.enter(_request(name, course), course.session)
        except PagemillError as error:
            is_full = error.status in (429, 503)
            self._events.after(NETWORK_S, partial(self._end, course, "refused" if is_full else error))
            return
        site.courses[name] = course
        course.was_accepted = True
        course.weights_digest = course.weights_digest or site.engine.weights_digest
        self._events.after(NETWORK_S, partial(self._brain.accepted, choice))

    def _started(self, course: Course, num_cached_tokens: int) -> None:
        assert course.choice is not None
        self._brain.started(course.choice, (self._events.now_s - course.attempt_sent_s) * 1000)
        course.attempt_first_s = self._events.now_s
        if course.first_token_s is None:
            course.first_token_s, course.num_cached_tokens = self._events.now_s, num_cached_tokens

    def _end(self, course: Course, how: FailureKind | PagemillError | None) -> None:
        """End the latest attempt."""
        assert course.ended is not None
        course.ended.set_result(how)

    def _finished(self, course: Course, choice: Assignment, target: Target) -> None:
        num_tokens = len(course.output)
        self._brain.finished(choice, CompletedRequest(num_tokens, _pace_ms(course)))
        if is_low_priority(course.priority):
            return
        served = course.served("served")
        self._brain.record_outcome(
            RequestOutcome(
                target.deployment,
                len(course.prompt),
                course.num_cached_tokens,
                num_tokens,
                served.ttft_ms,
                served.tpot_ms,
            )
        )

    def _is_over(self, course: Course, choice: Assignment, kind: FailureKind) -> bool:
        """Record a failure; return whether the request may not be tried again."""
        attempts = course.attempts
        progressed = len(course.output) > course.num_tokens_before
        if not course.output:
            course.weights_digest = ""
        if progressed:
            attempts.progressed()
        if kind == "refused":
            attempts.refused("full")
        elif kind in ("declined", "unreachable"):
            attempts.declined("gone")
        else:
            attempts.ended("lost", crashed=kind == "crashed")
        course.engine_failures.failed(choice, kind, progressed=progressed)
        return attempts.exhausted


def _request(name: str, course: Course) -> GenerateRequest:
    """Return the engine request for the missing part of the answer."""
    return GenerateRequest(
        request_id=name,
        model=MODEL,
        prompt_token_ids=course.prompt,
        sampling=SamplingParams(max_tokens=course.max_tokens, ignore_eos=True, seed=course.index),
        resume=[ChoiceResume(0, list(course.output), 0)] if course.output else [],
        weights_digest=course.weights_digest if course.output else "",
        cached_tokens=course.num_cached_tokens if course.output else None,
        priority=course.priority,
    )


def _pace_ms(course: Course) -> float | None:
    """Return the mean time between tokens of the latest attempt, in milliseconds; None with too few tokens."""
    num_tokens = len(course.output) - course.num_tokens_before - 1
    if course.attempt_first_s is None or num_tokens < LEAST_TIMED_TOKENS:
        return None
    return (course.last_token_s - course.attempt_first_s) * 1000 / num_tokens
