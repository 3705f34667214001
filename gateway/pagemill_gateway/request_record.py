"""The record of one request, for its access log line, metrics and traces. It holds no text of the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pagemill_gateway.brain.interface import DEFAULT_TICKET, Assignment, FailureKind, QueueTicket, Target
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.generate import FinishReason, FrameMeta, GenerateRequest, Usage
from pagemill_protocol.sampling import SamplingParams, gives_way


@dataclass(slots=True)
class AttemptRecord:
    """One attempt at one engine; times are of the monotonic clock."""

    endpoint_id: str
    policy: str
    predicted_cached_tokens: int
    queued_s: float
    """In the deployment's queue, before it was chosen."""
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended_at: float | None = None
    engine_queue_s: float = 0.0
    continued: AttemptRecord | None = None
    """The one whose answer it goes on with."""
    num_continued_tokens: int = 0
    """Generated before it, by all that it goes on with."""
    outcome: FailureKind | Literal["served", "abandoned"] = "abandoned"
    """What failed; abandoned: the client left, or the deadline passed."""

    def ended(self, outcome: FailureKind | Literal["served"]) -> None:
        self.ended_at = time.monotonic()
        self.outcome = outcome


@dataclass(slots=True)
class RequestRecord:
    """Filled while the request passes through; times are of the monotonic clock."""

    route: str
    request_id: str = ""
    started_at: float = field(default_factory=time.monotonic)
    ticket: QueueTicket = DEFAULT_TICKET
    """Of the whole client request."""
    model: str = ""
    """The deployment's own name, never what the client wrote: metrics must not grow with what clients invent."""
    deployment: str = ""
    tenant: str = ""
    response_id: str = ""
    stream: bool = False
    num_prompts: int = 0
    num_choices: int = 1
    """Of all prompts together."""
    prompt_tokens: int = 0
    dialect: str = "chat"
    sampling: SamplingParams | None = None
    """Of the first prompt; `None` until the request is parsed."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    """In order; several for several attempts or prompts."""
    route_header: str = ""
    """Where the latest attempt went and by which decision, for the client's `x-pagemill-route`."""
    decision: int = 0
    """The latest attempt's. Clients with a key are not shown it: it counts the requests of all tenants."""
    is_keyed: bool = False
    num_retries: int = 0
    queued_s: float = 0.0
    """Time in queues; of several prompts, of the one that waited longest."""
    num_migrations: int = 0
    """How often another engine continued the answer."""
    num_migrated_tokens: int = 0
    """Generated before, and computed again there as part of the prompt."""
    prepare_s: float | None = None
    first_frame_at: float | None = None
    num_delivered: int = 0
    """Tokens that engines have delivered so far."""
    finished: bool = False
    """Every engine request came to its own end; `usage` is complete."""
    finish_reasons: set[FinishReason] = field(default_factory=set)
    ended_by_limit: bool = False
    """A limit of the key ended the answer, by `length`."""
    usage: Usage = field(default_factory=Usage)
    gives_way: bool = False
    """To all others, as a batch's line does."""
    status: int = 0
    error_code: str | None = None

    def served_by(self, target: Target, requests: Sequence[GenerateRequest]) -> None:
        self.model = target.model
        self.deployment = target.deployment
        self.gives_way = gives_way(requests[0].priority)
        self.response_id = requests[0].response_id or requests[0].request_id
        self.stream = requests[0].stream
        self.dialect = requests[0].dialect
        self.sampling = requests[0].sampling
        self.num_prompts = len(requests)
        self.num_choices = sum(request.sampling.n for request in requests)
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.queued_s = target.queued_s
        self.prepare_s = self.duration_s() - target.queued_s
        if len(requests) > 1:
            self.ticket = self.ticket._replace(num_bytes=self.ticket.num_bytes // len(requests))

    @property
    def endpoints(self) -> list[str]:
        return [attempt.endpoint_id for attempt in self.attempts]

    def chosen(self, assignment: Assignment) -> AttemptRecord:
        """Begins the attempt at it."""
        cached = assignment.predicted_cached_tokens
        attempt = AttemptRecord(assignment.endpoint_id, assignment.policy, cached, assignment.queued_s)
        self.attempts.append(attempt)
        basis = "" if assignment.believed else "; own counts"
        decision = "" if self.is_keyed else f"; decision={assignment.decision}"
        self.route_header = f"{assignment.policy}; {assignment.endpoint_id}; cached={cached}{decision}{basis}"
        self.decision = assignment.decision
        return attempt

    def failed(self, error: PagemillError) -> None:
        self.error_code = error.code or error.type

    @property
    def output_tokens(self) -> int:
        """Also of an answer that broke."""
        return max(self.usage.completion_tokens, self.num_delivered)

    @property
    def ttft_s(self) -> float | None:
        return self.first_frame_at - self.started_at if self.first_frame_at is not None else None

    def duration_s(self) -> float:
        return time.monotonic() - self.started_at

    def saw(self, meta: FrameMeta, attempt: AttemptRecord) -> None:
        if attempt.first_token_at is None and meta.token_ids:
            attempt.first_token_at = time.monotonic()
            if self.stream and self.first_frame_at is None:
                self.first_frame_at = attempt.first_token_at
        attempt.engine_queue_s = meta.queue_s or attempt.engine_queue_s
        self.num_delivered += len(meta.token_ids)
        if meta.finish_reason is not None:
            self.finish_reasons.add(meta.finish_reason)

    def add_usage(self, usage: Usage) -> None:
        total = self.usage
        self.usage = Usage(
            prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
            completion_tokens=total.completion_tokens + usage.completion_tokens,
            cached_tokens=total.cached_tokens + usage.cached_tokens,
        )
