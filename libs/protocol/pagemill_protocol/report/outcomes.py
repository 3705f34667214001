"""The outcome of a client's request: one word, counted once at its end, whatever its status line said.

A stream that ends in an error event has begun with status 200, so the status says little. The word is the label
`outcome` of metrics, a field of the access log and an attribute of traces; the reference page is generated from
`OUTCOMES`, and recording rules use `BURNING`. The gateway's `request_record` has the facts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Outcome = Literal[
    "completed", "client_left", "refused", "no_capacity", "failed_before_first_token", "failed_after_first_token"
]


class OutcomeSpec(NamedTuple):
    """What one outcome means for clients and operators."""

    name: Outcome
    when: str
    status: str
    body: str
    burns: bool
    """Whether it uses up the error budget of availability."""


OUTCOMES: tuple[OutcomeSpec, ...] = (
    OutcomeSpec("completed", "The client got the whole answer.", "200", "the answer", burns=False),
    OutcomeSpec(
        "client_left",
        "The client disconnected, read nothing for too long, or cancelled the batch or the response in the background.",
        "499 in log and metrics",
        "none, or a part of the answer",
        burns=False,
    ),
    OutcomeSpec(
        "refused",
        "The client's request or its own limit is the cause.",
        "400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 426, 429, 431",
        "an error that names the field or the limit",
        burns=False,
    ),
    OutcomeSpec(
        "no_capacity",
        "There was no room in time: a full queue, a queue's timeout, a deadline before the first token, no engine that "
        "is ready, or a gateway that is full.",
        "429 `queue_full`, 503, 504; 200 if the stream had begun with comments",
        "an error with `Retry-After`, or an error event",
        burns=True,
    ),
    OutcomeSpec(
        "failed_before_first_token",
        "The request failed, and the client has got nothing of the answer.",
        "500, 502, 503; 200 if the stream had begun with comments",
        "an error, or an error event",
        burns=True,
    ),
    OutcomeSpec(
        "failed_after_first_token",
        "The answer broke off: engines failed, the deadline passed, or the gateway shut down.",
        "200",
        "a part of the answer, and an error event in a stream; other connections are closed",
        burns=True,
    ),
)
BURNING: tuple[Outcome, ...] = tuple(each.name for each in OUTCOMES if each.burns)
COUNTED: tuple[Outcome, ...] = ("completed", *BURNING)
"""The outcomes of requests that count for availability."""
NO_FIRST_TOKEN: tuple[Outcome, ...] = ("no_capacity", "failed_before_first_token")
"""The outcomes of streams that missed the objective of first tokens by having none."""
CLIENT_CLOSED = 499
NO_CAPACITY = frozenset({
    "deadline_exceeded",
    "deadline_unreachable",
    "draining",
    "model_not_ready",
    "queue_full",
    "retry_budget_exhausted",
    "server_is_overloaded",
    "too_many_connections",
})  # fmt: skip
"""The codes of errors that say that there was no room in time."""


def outcome_of(status: int, code: str | None, *, after_first_token: bool) -> Outcome:
    """Return the outcome of a request that ended with this error; status 0 or below 400: with none.

    `after_first_token`: the client had got a part of the answer.
    """
    if status < 400:
        return "completed"
    if status == CLIENT_CLOSED:
        return "client_left"
    if status < 500 and code not in NO_CAPACITY:
        return "refused"
    if after_first_token:
        return "failed_after_first_token"
    return "no_capacity" if code in NO_CAPACITY else "failed_before_first_token"


assert {each.name for each in OUTCOMES} == set(get_args(Outcome))
