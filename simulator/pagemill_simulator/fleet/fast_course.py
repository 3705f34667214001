"""What the gateway of a fleet in fast-forward keeps of each request, and of each pod that it sends them to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagemill_gateway.admission.attempts import Attempts
from pagemill_gateway.admission.fair_queue import Waiter
from pagemill_gateway.admission.reservations import Need
from pagemill_simulator.fleet.fast_pod import FastPod
from pagemill_simulator.fleet.fast_row import Row
from pagemill_simulator.fleet.outcome import Ending, Served
from pagemill_simulator.pod import FRAME_INTERVAL_S


@dataclass(slots=True, eq=False)
class Site:
    """One start of a pod."""

    name: str
    pod: FastPod
    slot: int
    courses: dict[Course, None] = field(default_factory=dict)
    """Sent there and not ended."""
    looked_at_s: float = math.inf
    """When it is looked at next."""
    reported_s: float = -FRAME_INTERVAL_S
    """When its latest report left it."""
    was_idle: bool = True
    """At its latest report."""
    is_report_due: bool = False
    unaccepted: list[tuple[float, int]] = field(default_factory=list)
    """When its word arrives that it has a request, and the decision that sent it."""
    unreported: list[Course] = field(default_factory=list)
    """Sent there and not in its latest report."""
    is_open: bool = True
    """It may get requests."""


@dataclass(slots=True, eq=False)
class Course:
    """One request under way."""

    index: int
    """In the workload."""
    num_prompt_tokens: int
    max_tokens: int
    session: int | None
    arrival_s: float
    need: Need | None = None
    """As it was thought when it asked for an engine, and one was there."""
    num_uncached_tokens: int = 0
    """Of its prompt, where it was sent."""
    decision: int = 0
    """That sent it."""
    site: Site | None = None
    row: Row | None = None
    """There."""
    num_made: int = 0
    """Tokens of its answer, before the latest attempt."""
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_cached_tokens: int = 0
    was_sent: bool = False
    is_counted: bool = False
    """Among the arrivals."""
    waiter: Waiting | None = None
    waited_s: float = 0.0
    """In the queue, earlier."""
    attempts: Attempts | None = None
    """Once it has failed."""

    def served(self, ending: Ending) -> Served:
        ttft_ms = None if self.first_token_s is None else (self.first_token_s - self.arrival_s) * 1000
        tpot_ms = None
        if self.first_token_s is not None and self.num_made > 1:
            tpot_ms = (self.last_token_s - self.first_token_s) * 1000 / (self.num_made - 1)
        return Served(self.arrival_s, self.num_prompt_tokens, self.num_made, ending, ttft_ms, tpot_ms)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Waiter):
    course: Course
    entered_s: float
