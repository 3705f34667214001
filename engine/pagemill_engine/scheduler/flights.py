"""The steps in flight: launched and not read yet, oldest first. The plain loop has one at a time, the overlapped two.

What a step computes for a row counts when the step is read, unless the row was recalled meanwhile: it ended with an
earlier step, or starts over. That overshoot is dropped here, before anything is booked. `may_follow` is the one rule
on which rows are not launched again before their step in flight was read. Knows no block (`kv`) and no queue
(`scheduler`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagemill_engine.scheduler.choices import HeldChoices
from pagemill_engine.scheduler.request import Request
from pagemill_engine.scheduler.step import StepPlan


@dataclass(slots=True)
class Flight:
    plan: StepPlan
    recalled: set[str] = field(default_factory=set)
    """Rows for which nothing of this step counts any more. By then the name may belong to another row."""

    def rows(self, known: dict[str, Request]) -> list[Request]:
        """Rows for which the step still counts."""
        names = self.plan.num_scheduled_tokens
        return [known[name] for name in names if name in known and name not in self.recalled]

    def admitted_rows(self, known: dict[str, Request]) -> list[Request]:
        """Those of them that started with this step."""
        started = {admitted.request_id for admitted in self.plan.admitted}
        return [row for row in self.rows(known) if row.request_id in started]


class Flights:
    def __init__(self) -> None:
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    def launch(self, plan: StepPlan) -> None:
        self._flights.append(Flight(plan))

    def oldest(self, plan: StepPlan) -> Flight:
        """The flight of `plan`, which is the next to be read."""
        flight = self._flights[0]
        if flight.plan is not plan:
            raise RuntimeError(f"step {plan.step} is read before step {flight.plan.step}, which was launched earlier")
        return flight

    def land(self, plan: StepPlan) -> Flight | None:
        """The step was read, or will never be; None when it never took off."""
        for index, flight in enumerate(self._flights):
            if flight.plan is plan:
                return self._flights.pop(index)
        return None

    def drop_all(self) -> list[Flight]:
        dropped, self._flights = self._flights, []
        return dropped

    def carries(self, row: Request) -> bool:
        name = row.request_id
        return any(name in flight.plan.num_scheduled_tokens and name not in flight.recalled for flight in self._flights)

    def recall(self, row: Request) -> None:
        for flight in self._flights:
            if row.request_id in flight.plan.num_scheduled_tokens:
                flight.recalled.add(row.request_id)


def may_follow(row: Request, held: HeldChoices) -> bool:
    """May a step have the row before the row's step in flight was read?

    Not when the row surely ends with that step, aborted or at its limit; not when choices are about to fork from it:
    they share its last block, which nobody may be writing; and not when a search will decide which token it goes on
    with. (Suspects run alone: `Scheduler.schedule`.) Where a stop token ends a row this is known too late: the row is
    computed once too often, and recalled.
    """
    if row.aborted or len(row.token_ids) + row.num_pending_tokens >= row.max_total_tokens:
        return False
    if row.search is not None and row.num_pending_tokens:
        return False
    return not (held.num_held and held.fork_is_due(row))
