"""The messages between workers and the control process: tagged msgspec structs in msgpack.

A call has a number, and gets one reply or refusal with the same number; other messages have no answer. Docstrings of
questions name the type of the answer. The values are those of `pagemill_routing.brain.interface`, `limits.store` and
`ports`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from pagemill_gateway.limits import store
from pagemill_gateway.ports import WhatIf
from pagemill_routing.brain.interface import (
    CompletedRequest,
    FailureKind,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    Target,
)
from pagemill_servers.keys.caller import Caller

Question = TypeVar("Question")


class Call(msgspec.Struct, Generic[Question], frozen=True, array_like=True, tag="call"):
    number: int
    """The number of the call, by the caller's count on this connection."""
    question: Question


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    value: msgspec.Raw


class CallRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A `PagemillError` in place of an answer."""

    number: int
    message: str
    status: int
    kind: str
    """`PagemillError.type`."""
    param: str | None
    code: str | None
    retry_after_s: float | None


class Abandoned(msgspec.Struct, frozen=True, array_like=True, tag="given_up"):
    """A call's caller was cancelled and needs no answer."""

    number: int


# Calls of workers.


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
    """An `Assignment`."""

    target: Target
    tried: frozenset[str]
    ask: RoutingRequest
    ticket: QueueTicket
    retry: RetryContext | None


class GetLiveness(msgspec.Struct, frozen=True, array_like=True, tag="liveness"):
    """A `Liveness`."""

    endpoint_id: str


class Expected(msgspec.Struct, frozen=True, array_like=True, tag="expected"):
    """A float, or None."""

    model: str
    ticket: QueueTicket


class GetIdleCapacity(msgspec.Struct, frozen=True, array_like=True, tag="idle_capacity"):
    """A number of requests."""

    model: str
    max_load: float


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """An `Answer` of `limits.store`."""

    ask: store.ReservationRequest


class Extend(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """The number of added tokens."""

    more: store.ExtensionRequest


class GetUse(msgspec.Struct, frozen=True, array_like=True, tag="use"):
    """A `UseReport` of `limits.store`."""

    accounts: list[str]


class GetSettled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """None, when the settlements before are counted."""


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """A `GatewayStatus`."""


class GetFleet(msgspec.Struct, frozen=True, array_like=True, tag="fleet"):
    """Bytes of JSON."""


class GetSamples(msgspec.Struct, frozen=True, array_like=True, tag="samples"):
    """A list of `PlotPoint`."""

    after: int


class GetDecisions(msgspec.Struct, frozen=True, array_like=True, tag="decisions"):
    """Bytes of JSON."""

    limit: int


class GetScaling(msgspec.Struct, frozen=True, array_like=True, tag="scaling"):
    """Bytes of JSON."""

    limit: int


class AskWhatIf(msgspec.Struct, frozen=True, array_like=True, tag="what_if"):
    """Bytes of JSON."""

    question: WhatIf


class GetBundle(msgspec.Struct, frozen=True, array_like=True, tag="bundle"):
    """Bytes."""

    digest: str


class KeepResponse(msgspec.Struct, frozen=True, array_like=True, tag="keep_response"):
    """None."""

    account: str
    response_id: str
    value: bytes


class GetResponse(msgspec.Struct, frozen=True, array_like=True, tag="get_response"):
    """Bytes, or None."""

    account: str
    response_id: str


class ForgetResponse(msgspec.Struct, frozen=True, array_like=True, tag="forget_response"):
    """Whether there was a response."""

    account: str
    response_id: str


# Notifications of workers.


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    decision: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    decision: int
    ttft_ms: float | None = None


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    decision: int


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
    """Measurements that are sent at an interval, so that little is lost when a worker dies."""

    measures: msgspec.Raw
    """A `WorkerMeasurements`, which is decoded only if the worker does not answer `Measure`."""


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    lease: str
    tokens: int


class Undo(msgspec.Struct, frozen=True, array_like=True, tag="undo"):
    lease: str


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Reservations of the previous control process. A worker's first notification has all of its own, even if none."""

    asks: list[store.ReservationRequest]


ResponseQuestion = KeepResponse | GetResponse | ForgetResponse
BrainQuestion = GetNames | LookUp | Find | Choose | GetLiveness | Expected | GetIdleCapacity
PageQuestion = GetFleet | GetSamples | GetDecisions | GetScaling | AskWhatIf | GetUse
WorkerQuestion = BrainQuestion | Reserve | Extend | GetSettled | GetStatus | PageQuestion | GetBundle | ResponseQuestion
EngineNote = Accepted | Started | Freed | Finished | Failed | Withdrawn
WorkerNote = EngineNote | RecordOutcome | PublishMeasurements | Settle | Undo | Adopt
ToControlProcess = Call[WorkerQuestion] | Reply | CallRefusal | Abandoned | WorkerNote


# Messages of the control process.


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """`WorkerMeasurements`."""


class KeepBundles(msgspec.Struct, frozen=True, array_like=True, tag="keep_bundles"):
    digests: frozenset[str]
    templates: frozenset[str]
    whole: bool


class ReplaceSharedKeys(msgspec.Struct, frozen=True, array_like=True, tag="shared_keys"):
    callers: list[Caller]


class RefuseContents(msgspec.Struct, frozen=True, array_like=True, tag="refuse_contents"):
    contents: frozenset[bytes]


ControlNote = KeepBundles | ReplaceSharedKeys | RefuseContents
ToWorker = Call[Measure] | Reply | CallRefusal | Abandoned | ControlNote
