"""Recovers from failed steps: blames the sequences that failed, and lets all others compute what they lost again.

A sequence that failed alone is blamed. After a step that failed as a whole, its sequences are probed: each runs alone
(`scheduler`) until it is cleared or blamed.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagemill_engine.kv.block_pool import Block
from pagemill_engine.scheduler.in_flight_steps import InFlightStep
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_engine.scheduler.sequences import Sequences
from pagemill_execution.step import StepPlan


class StepRecovery:
    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def step_failed(self, plan: StepPlan, message: str) -> None:
        """Handle a step that raised as a whole: blame a sequence that ran alone, probe several one by one. A step that
        was launched behind the failed one read incomplete KV, so its sequences start over."""
        sequences, by_id = self._sequences, self._sequences.by_id
        dropped = sequences.in_flight.drop_all()
        sequences.release_again([name for in_flight in dropped for name in in_flight.plan.released])
        probed = next(in_flight.sequences(by_id) for in_flight in dropped if in_flight.plan is plan)
        for seq in by_id.values():
            sequences.discard(seq)
        # It is not known whether the blocks that were to be moved, of any sequence, are where they should be.
        has_moved = sequences.kv.split.moves and any(
            changes.copies for in_flight in dropped for changes in in_flight.plan.tables
        )
        if probed and len(plan.num_scheduled_tokens) == 1:  # not if the only one was discarded since the launch
            sequences.kv.invalidate(probed[0])
            sequences.fail(probed[0], message)
            if len(dropped) == 1 and not has_moved:
                return
        for seq in list(sequences.running):
            sequences.preempt(seq)
        if has_moved:
            while (fork := sequences.last_fork()) is not None:
                sequences.drop_fork(fork)
            sequences.kv.reset_prefix_cache()
        for seq in [seq for in_flight in dropped for seq in in_flight.sequences(by_id)]:
            if seq.aborted and seq.state is not SequenceState.FINISHED:
                sequences.finish(seq, "abort")
        sequences.probing = [seq for seq in probed if seq.state is not SequenceState.FINISHED]

    def abandon(self, affected: Iterable[Sequence], message: str) -> None:
        """Fail sequences that may be inconsistent."""
        sequences = self._sequences
        for seq in affected:
            if sequences.kv.has_table(seq):
                sequences.kv.invalidate(seq)
            if sequences.outputs.has_end(seq):
                sequences.free(seq)
            else:
                sequences.fail(seq, message)

    def fail_broken(self, in_flight: InFlightStep, broken: dict[str, str]) -> None:
        """Fail the broken sequences of a step, with the message of each id. Sequences of steps in flight that read the
        blocks which the broken ones were writing start over."""
        sequences = self._sequences
        failed = [seq for seq in in_flight.sequences(sequences.by_id) if seq.request_id in broken]
        # If a broken sequence was preempted since, the blocks it was writing are unknown: then no reader is trusted.
        blind = any(seq.state is not SequenceState.RUNNING for seq in failed)
        untrusted: set[Block] = set()
        for seq in failed:
            untrusted |= sequences.kv.invalidate(seq)
        for reader in [each for step in sequences.in_flight for each in step.admitted_sequences(sequences.by_id)]:
            if reader in failed or reader.state is SequenceState.FINISHED:
                continue
            if reader.state is SequenceState.RUNNING and not blind and not sequences.kv.holds_any(reader, untrusted):
                continue
            untrusted |= sequences.kv.invalidate(reader)
            sequences.discard(reader)
            if reader.aborted:
                sequences.finish(reader, "abort")
            elif reader.state is SequenceState.RUNNING:
                sequences.preempt(reader)
        for seq in failed:
            sequences.fail(seq, broken[seq.request_id])
