"""The steps in flight: steps that were launched and not read yet, oldest first.

The plain loop has one at a time, the overlapped loop two, and one more for each further stage of the runner. The
results of a step are applied when it is read, except for sequences that were discarded since its launch because they
ended with an earlier step or start over. `can_run_ahead` decides which sequences must not be launched again before
their step in flight is read, `turn_of` which decodes a step of several stages takes. Blocks are `kv`'s part, queues
`scheduler`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagemill_engine.scheduler.choices import WaitingChoices
from pagemill_engine.scheduler.order.sorted_sequences import SortedSequences
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_execution.step import StepPlan


@dataclass(slots=True)
class InFlightStep:
    plan: StepPlan
    discarded: set[str] = field(default_factory=set)
    """Ids of sequences whose results of this step are dropped. Other sequences may have reused these ids."""

    def sequences(self, known: dict[str, Sequence]) -> list[Sequence]:
        """Return the sequences whose results of this step are applied."""
        names = self.plan.num_scheduled_tokens
        return [known[name] for name in names if name in known and name not in self.discarded]

    def admitted_sequences(self, known: dict[str, Sequence]) -> list[Sequence]:
        """Return the sequences of `sequences` that started with this step."""
        started = {admitted.request_id for admitted in self.plan.admitted}
        return [sequence for sequence in self.sequences(known) if sequence.request_id in started]


class InFlightSteps:
    def __init__(self) -> None:
        self._in_flight: list[InFlightStep] = []

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._in_flight)

    def launch(self, plan: StepPlan) -> None:
        self._in_flight.append(InFlightStep(plan))

    def oldest(self, plan: StepPlan) -> InFlightStep:
        """Return the step of `plan`. Raises RuntimeError if it is not the next one to be read."""
        oldest = self._in_flight[0]
        if oldest.plan is not plan:
            raise RuntimeError(f"step {plan.step} is read before step {oldest.plan.step}, which was launched earlier")
        return oldest

    def complete(self, plan: StepPlan) -> InFlightStep | None:
        """Remove the step of `plan`, which was read or will never be. Returns None if it was never launched."""
        for index, step in enumerate(self._in_flight):
            if step.plan is plan:
                return self._in_flight.pop(index)
        return None

    def drop_all(self) -> list[InFlightStep]:
        dropped, self._in_flight = self._in_flight, []
        return dropped

    def includes(self, sequence: Sequence) -> bool:
        name = sequence.request_id
        return any(name in step.plan.num_scheduled_tokens and name not in step.discarded for step in self._in_flight)

    def discard(self, sequence: Sequence) -> None:
        for step in self._in_flight:
            if sequence.request_id in step.plan.num_scheduled_tokens:
                step.discarded.add(sequence.request_id)


def can_run_ahead(sequence: Sequence, held: WaitingChoices) -> bool:
    """Whether a step may include the sequence before the sequence's step in flight is read.

    It may not if the sequence certainly ends with the step in flight: aborted, or at its token limit. It may not if
    choices are about to fork from it, because they share its last block, which must not be written meanwhile. It may
    not if the value of its pending token matters: to a beam search, to its form or to its bad words, or if it is not
    known how many of several pending tokens are sampled. (Probed sequences run alone: `Scheduler.schedule`.) Whether
    a stop token ends the sequence is known too late: the sequence is computed once too often, and that result is
    discarded.
    """
    if sequence.aborted or len(sequence.token_ids) + sequence.num_pending_tokens >= sequence.max_total_tokens:
        return False
    if sequence.num_pending_tokens and (
        sequence.search is not None or sequence.needs_last_token or sequence.num_pending_tokens > 1
    ):
        return False
    return not (held.num_waiting and held.fork_is_due(sequence))


def turn_of(running: SortedSequences, in_flight: InFlightSteps, num_stages: int) -> list[Sequence]:
    """Return the running sequences of which a step may compute tokens: with one stage all. With several all that are
    in their prefill, and an equal part of the decodes, those in flight included, so that every stage has some.

    As many steps decode at a time as there are stages. Another one would have the few that are left over, and take
    nearly as long as one with an equal part. Decodes whose token is in flight wait: the first stage does not know it.
    """
    if num_stages == 1:
        return [*running]
    most = 0
    if sum(1 for step in in_flight if step.plan.decode_context_tokens) < num_stages:
        most = -(-sum(1 for sequence in running if sequence.num_due_tokens <= 1) // num_stages)
    found = []
    for sequence in running:
        if sequence.num_due_tokens <= 1:
            if sequence.num_pending_tokens or most < 1:
                continue
            most -= 1
        found.append(sequence)
    return found
