"""What workers and the brain's process say to each other: tagged msgspec structs, msgpack on the wire.

A question has a number and gets one answer or one refusal under it; all else is told and not answered. The values
inside are those of `brain.interface`, `limits.store` and `ports`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from pagemill_gateway.brain.interface import (
    CompletedRequest,
    FailureKind,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    Target,
)
from pagemill_gateway.limits import store
from pagemill_protocol.keys.caller import Caller

Question = TypeVar("Question")


class Call(msgspec.Struct, Generic[Question], frozen=True, array_like=True, tag="call"):
    number: int
    """Of this side's questions on this connection."""
    question: Question


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    value: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A `PagemillError`."""

    number: int
    message: str
    status: int
    kind: str
    """`PagemillError.type`."""
    param: str | None
    code: str | None
    retry_after_s: float | None


class Abandoned(msgspec.Struct, frozen=True, array_like=True, tag="given_up"):
    """Nobody waits for the answer any more."""

    number: int


# What workers ask.


class GetNames(msgspec.Struct, frozen=True, array_like=True, tag="names"):
    """A list of `ServedName`."""


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """A `Target`."""

    model: str


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """A `Target`."""

    model: str
    ticket: QueueTicket


class Choose(msgspec.Struct, frozen=True, array_like=True, tag="choose"):
    """A `Choice`."""

    target: Target
    tried: frozenset[str]
    ask: RoutingRequest
    ticket: QueueTicket
    retry: RetryContext | None


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """A bool."""

    endpoint_id: str


class Expected(msgspec.Struct, frozen=True, array_like=True, tag="expected"):
    """A float, or nothing."""

    model: str
    ticket: QueueTicket


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """An `Reply` of `limits.store`."""

    ask: store.Ask


class Extend(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Tokens: a number."""

    more: store.More


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """A `Standing`."""


class GetBundle(msgspec.Struct, frozen=True, array_like=True, tag="bundle"):
    """Bytes."""

    digest: str


# What workers tell. Decisions are named by their number.


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    decision: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    decision: int
    ttft_ms: float | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    decision: int
    served: CompletedRequest | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    decision: int
    kind: FailureKind


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag="given_back"):
    decision: int


class RecordOutcome(msgspec.Struct, frozen=True, array_like=True, tag="experienced"):
    outcome: RequestOutcome


class PublishMeasurements(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """Unasked, so that little is lost with a worker that dies."""

    measures: msgspec.Raw
    """`Measures`; read by nobody while the worker lives."""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    lease: str
    tokens: int


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Reserved at the head before this one. A worker's first note has all that it holds, also if that is nothing."""

    asks: list[store.Ask]


WorkerQuestion = GetNames | LookUp | Find | Choose | Alive | Expected | Reserve | Extend | GetStatus | GetBundle
WorkerNote = Accepted | Started | Finished | Failed | Withdrawn | RecordOutcome | PublishMeasurements | Settle | Adopt
ToControlProcess = Call[WorkerQuestion] | Reply | Refusal | Abandoned | WorkerNote


# What the brain's process asks and tells.


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """`Measures`."""

    endpoint_ids: frozenset[str]


class KeepBundles(msgspec.Struct, frozen=True, array_like=True, tag="keep_bundles"):
    digests: frozenset[str]
    templates: frozenset[str]
    whole: bool


class ReplaceSharedKeys(msgspec.Struct, frozen=True, array_like=True, tag="shared_keys"):
    callers: list[Caller]


ControlNote = KeepBundles | ReplaceSharedKeys
ToWorker = Call[Measure] | Reply | Refusal | Abandoned | ControlNote
