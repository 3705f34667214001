"""Estimates the TTFT of a request that is sent to one pod now, by simulating the pod's steps.

Every report restarts the simulation from the engine's state at that time, and requests sent since are added. Two
quantities are learned, because no report has them: the time until a request reaches the engine, and a constant overhead
on top of the steps. `brain.endpoints.dispatches` knows which of our requests a report does not count yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagemill_gateway.brain.endpoints.dispatches import Dispatch
from pagemill_gateway.routing.step_simulation import PendingPrompt, StepSimulation
from pagemill_gateway.routing.step_time_snapshot import DEFAULT_STEP_TOKENS
from pagemill_protocol.state import EngineLoad
from pagemill_protocol.step_time import StepTimeModel

WINDOW = 32
"""The number of values of a learned median."""
LARGEST_DRIFT = 1.5
"""The limit for reported drifts, larger than any that an engine computes."""
MAX_TRANSFER_S = 0.1
"""Longer transfers to the engine are exceptions and count as this."""


LONG_AGO = float("-inf")


class _Report(NamedTuple):
    """A report from which no simulation was started yet."""

    load: EngineLoad
    reported_s: float
    received_s: float
    model: StepTimeModel
    max_step_tokens: int
    waiting: Sequence[Dispatch] | None
    unreported: Sequence[tuple[int, Dispatch]]


class TtftEstimator:
    def __init__(self) -> None:
        self._report: _Report | None = None
        """The report to simulate from at the next request; most reports are replaced before."""
        self._simulation: StepSimulation | None = None
        self._overlaps = False
        self._sent: dict[int, tuple[float, float | None]] = {}
        """For each decision, the time at which it was sent and the simulated milliseconds of its steps."""
        self._transfer_s = _Median(prior=0)
        self._overhead_ms = _Median(prior=3)

    def received(
        self,
        load: EngineLoad,
        age_ms: float,
        model: StepTimeModel | None,
        max_step_tokens: int,
        waiting: Sequence[Dispatch] | None,
        unreported: Sequence[tuple[int, Dispatch]],
        now_s: float,
    ) -> None:
        """Apply a report. `waiting`: our requests that it counts as waiting, or `None` if others wait, too.

        `unreported`: our requests that it does not count.
        """
        self._simulation = self._report = None
        if model is None:
            return
        self._overlaps = self._overlaps or load.step_in_flight_ms > 0
        self._report = _Report(load, now_s - age_ms / 1000, now_s, model, max_step_tokens, waiting, unreported)

    def forget(self) -> None:
        """Drop the simulation, because the engine's state is unknown."""
        self._simulation = self._report = None

    def ttft_ms(self, decision: int, dispatch: Dispatch, now_s: float, held_ms: float = 0.0) -> float | None:
        """Note a decision that is sent now; return its expected TTFT in milliseconds, or `None` if unknown.

        `held_ms`: the request waits this long at the engine, for example for its adapter, while steps go on.
        """
        at_s = now_s + self._transfer_s.value + held_ms / 1000
        steps_ms = None
        simulation = self._current()
        if simulation is not None:
            simulation.advance(now_s)
            pending = self._pending(dispatch, at_s)
            steps_ms = (simulation.first_token_s(pending) - now_s) * 1000
            if not held_ms:
                simulation.queue.append(pending)
        teaches = self._transfer_s.known and not held_ms
        self._sent[decision] = now_s, steps_ms if teaches else None
        return max(steps_ms / 2, steps_ms + self._overhead_ms.value) if steps_ms is not None else None

    def accepted(self, decision: int, now_s: float) -> None:
        """Note that the engine has accepted the request."""
        if decision in self._sent:
            self._transfer_s.learn(min(MAX_TRANSFER_S, max(0.0, now_s - self._sent[decision][0])))

    def started(self, decision: int, ttft_ms: float | None) -> None:
        """Note the first token, `ttft_ms` after the request was sent; `None` if not measured."""
        _, steps_ms = self._sent.get(decision, (0.0, None))
        if steps_ms is None or ttft_ms is None:
            return
        self._overhead_ms.learn(ttft_ms - steps_ms)

    def ended(self, decision: int, num_answers: int) -> None:
        """Note the end of the request, of which `num_answers` sequences were running."""
        simulation = self._current() if num_answers else self._simulation
        self._sent.pop(decision, None)
        if simulation is not None:
            simulation.num_answers = max(0, simulation.num_answers - num_answers)

    def _current(self) -> StepSimulation | None:
        """Return the simulation, restarted from a new report if there is one."""
        report, self._report = self._report, None
        if report is None:
            return self._simulation
        load, budget = report.load, report.max_step_tokens or DEFAULT_STEP_TOKENS
        simulation = StepSimulation(report.model, budget, overlaps=self._overlaps, drift=_readable(load.step_drift))
        simulation.num_answers = load.num_requests_running - load.num_requests_prefilling
        simulation.num_context_tokens = load.num_tokens_running - load.num_tokens_prefilled
        simulation.queue.extend(_reported(load, report.waiting))
        for decision, dispatch in report.unreported:
            at_s = self._at_s(decision, report.received_s)
            simulation.queue.append(self._pending(dispatch, max(report.reported_s, at_s)))
        simulation.begin(report.reported_s, load.step_in_flight_ms, report.received_s)
        self._simulation = simulation
        return simulation

    def _at_s(self, decision: int, now_s: float) -> float:
        sent_s, _ = self._sent.get(decision, (now_s, None))
        return sent_s + self._transfer_s.value

    def _pending(self, dispatch: Dispatch, at_s: float) -> PendingPrompt:
        return PendingPrompt(at_s, dispatch.num_uncached_tokens, dispatch.num_cached_tokens, dispatch.num_sequences)


class _Median:
    """The median of the latest values; 0 before the first."""

    def __init__(self, prior: int) -> None:
        """`prior` is the number of zeros to begin with, so that single outliers have no effect."""
        self.value = 0.0
        self._values = deque([0.0] * prior)
        self._sorted = [0.0] * prior

    @property
    def known(self) -> bool:
        return len(self._values) > 0

    def learn(self, value: float) -> None:
        if len(self._values) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)
        self.value = self._sorted[len(self._sorted) // 2]


def _readable(drift: float) -> float:
    return max(-LARGEST_DRIFT, min(LARGEST_DRIFT, drift)) if drift == drift else 0.0


def _reported(load: EngineLoad, waiting: Sequence[Dispatch] | None) -> list[PendingPrompt]:
    """Return the prompts that waited in the report. Reports count cached tokens as waiting, `waiting` does not."""
    rows = []
    if load.num_tokens_prefilling:
        rows.append(
            PendingPrompt(LONG_AGO, load.num_tokens_prefilling, load.num_tokens_prefilled, load.num_requests_prefilling)
        )
    if waiting is not None:
        return rows + [
            PendingPrompt(LONG_AGO, each.num_uncached_tokens, each.num_cached_tokens, each.num_sequences)
            for each in waiting
        ]
    num_tokens = load.num_tokens_waiting - load.num_tokens_prefilling
    if num_tokens > 0:
        rows.append(PendingPrompt(LONG_AGO, num_tokens, 0, load.num_requests_waiting))
    return rows
