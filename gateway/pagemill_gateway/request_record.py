"""The record of one request, for its access log line, metrics and traces. It contains no text of the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from pagemill_api.dialects.registry import dialect_of
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.outcomes import CLIENT_CLOSED, Outcome, outcome_of
from pagemill_protocol.request.generate import FinishReason, FrameMeta, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams, is_low_priority
from pagemill_routing.brain.interface import DEFAULT_TICKET, Assignment, FailureKind, QueueTicket, Target
from pagemill_servers.keys.caller import Caller


@dataclass(slots=True)
class AttemptRecord:
    """One attempt at one engine; times are of the monotonic clock."""

    endpoint_id: str
    policy: str
    predicted_cached_tokens: int
    queued_s: float
    """The time in the deployment's queue before the endpoint was chosen."""
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended_at: float | None = None
    engine_queue_s: float = 0.0
    continued: AttemptRecord | None = None
    """The attempt whose answer this one continues."""
    num_continued_tokens: int = 0
    """The tokens that all earlier attempts of the answer generated."""
    outcome: FailureKind | Literal["served", "abandoned"] = "abandoned"
    """The outcome; `abandoned`: the client disconnected, or the deadline passed."""

    def ended(self, outcome: FailureKind | Literal["served"]) -> None:
        self.ended_at = time.monotonic()
        self.outcome = outcome


@dataclass(slots=True)
class RequestRecord:
    """The record of a request, filled while it is processed; times are of the monotonic clock."""

    route: str
    request_id: str = ""
    started_at: float = field(default_factory=time.monotonic)
    ticket: QueueTicket = DEFAULT_TICKET
    """The ticket of the whole client request."""
    model: str = ""
    """The deployment's model name, not the client's text, so that clients cannot create new series of metrics."""
    deployment: str = ""
    tenant: str = ""
    account: str = ""
    """The caller's account, whose share of the limits the request uses."""
    allowed_failures: float | None = None
    """The share of the tenant's requests that its objective allows to fail."""
    response_id: str = ""
    stream: bool = False
    num_prompts: int = 0
    num_choices: int = 1
    """The choices of all prompts."""
    prompt_tokens: int = 0
    dialect: str = "chat"
    sampling: SamplingParams | None = None
    """The sampling parameters of the first prompt; `None` until the request is parsed."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    """All attempts of all prompts, in order."""
    route_header: str = ""
    """The value of the response header `x-pagemill-route`: policy, endpoint and decision of the latest attempt."""
    decision: int = 0
    """The latest attempt's decision. Clients with a key do not see it, because it counts requests of all tenants."""
    is_keyed: bool = False
    num_retries: int = 0
    queued_s: float = 0.0
    """The time in queues; of several prompts, the longest."""
    num_migrations: int = 0
    """How often another engine continued the answer."""
    num_migrated_tokens: int = 0
    """The generated tokens that another engine computed again as part of its prompt."""
    prepare_s: float | None = None
    first_frame_at: float | None = None
    num_events: int = 0
    """The events that the client has got, of a stream that numbers them."""
    num_delivered: int = 0
    """The tokens that engines have delivered so far."""
    finished: bool = False
    """Whether every engine request is complete, so that `usage` is."""
    finish_reasons: set[FinishReason] = field(default_factory=set)
    ended_by_limit: bool = False
    """Whether a limit of the key ended the answer, with the finish reason `length`."""
    usage: Usage = field(default_factory=Usage)
    is_low_priority: bool = False
    """Whether the request has low priority, as lines of batches have."""
    status: int = 0
    error_status: int = 0
    """The status of the error that ended the request, also if the answer had begun with another one."""
    error_code: str | None = None
    has_broken_off: bool = False
    """Whether the answer ended early after the client had got a part of it."""
    last_failure: FailureKind | Literal[""] = ""
    """The failure of the last engine that ended an attempt."""
    asked_model: str = ""
    """The name in a valid body, which may be unknown."""
    adapter: str = ""
    """The name of the adapter that serves the request; empty: none does."""

    def called_by(self, caller: Caller) -> None:
        self.tenant, self.account, self.is_keyed = caller.tenant, caller.account, bool(caller.key_hash)
        self.allowed_failures = None if caller.objective is None else 1 - caller.objective / 100

    def served_by(self, target: Target, requests: Sequence[GenerateRequest]) -> None:
        self.model = target.model
        self.adapter = self.asked_model if target.adapter_digest else ""
        self.deployment = target.deployment
        self.is_low_priority = is_low_priority(requests[0].priority)
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
            self.ticket = msgspec.structs.replace(self.ticket, num_bytes=self.ticket.num_bytes // len(requests))

    @property
    def operation(self) -> str:
        return dialect_of(self.dialect).operation

    @property
    def endpoints(self) -> list[str]:
        return [attempt.endpoint_id for attempt in self.attempts]

    def chosen(self, assignment: Assignment) -> AttemptRecord:
        """Add and return the record of an attempt at the assigned endpoint."""
        cached = assignment.predicted_cached_tokens
        attempt = AttemptRecord(assignment.endpoint_id, assignment.policy, cached, assignment.queued_s)
        self.attempts.append(attempt)
        basis = "" if assignment.believed else "; own counts"
        decision = "" if self.is_keyed else f"; decision={assignment.decision}"
        self.route_header = f"{assignment.policy}; {assignment.endpoint_id}; cached={cached}{decision}{basis}"
        self.decision = assignment.decision
        return attempt

    def failed(self, error: PagemillError) -> None:
        self.error_status, self.error_code = error.status, error.code or error.type

    def client_left(self) -> None:
        self.status = self.error_status = CLIENT_CLOSED

    @property
    def outcome(self) -> Outcome:
        """The outcome, once the request is over."""
        after_first_token = self.has_broken_off or (self.stream and self.num_delivered > 0)
        status = self.error_status or self.status
        return outcome_of(status, self.error_code, after_first_token=after_first_token)

    @property
    def output_tokens(self) -> int:
        """The output tokens, also of an answer that failed."""
        return max(self.usage.completion_tokens, self.num_delivered)

    @property
    def ttft_s(self) -> float | None:
        return self.first_frame_at - self.started_at if self.first_frame_at is not None else None

    def duration_s(self) -> float:
        return time.monotonic() - self.started_at

    def count(self, meta: FrameMeta, attempt: AttemptRecord) -> None:
        if attempt.first_token_at is None and meta.token_ids:
            attempt.first_token_at = time.monotonic()
            if self.stream and self.first_frame_at is None:
                self.first_frame_at = attempt.first_token_at
        attempt.engine_queue_s = meta.queue_s or attempt.engine_queue_s
        self.num_delivered += len(meta.token_ids)
        self.num_events = meta.num_events or self.num_events
        if meta.finish_reason is not None:
            self.finish_reasons.add(meta.finish_reason)

    def add_usage(self, usage: Usage) -> None:
        total = self.usage
        self.usage = Usage(
            prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
            completion_tokens=total.completion_tokens + usage.completion_tokens,
            cached_tokens=total.cached_tokens + usage.cached_tokens,
            proposed_tokens=total.proposed_tokens + usage.proposed_tokens,
            accepted_tokens=total.accepted_tokens + usage.accepted_tokens,
        )
