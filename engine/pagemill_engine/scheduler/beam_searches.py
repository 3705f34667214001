"""Runs beam searches on the scheduler's sequences.

The beams of a search wait for each other; then each forks, continues or leaves, as `scheduler.beams` decides. A beam
that has reported its candidates is in no queue and no batch, but keeps its blocks. Like a fork that has not started, it
loses them when memory is short, and its successors compute its tokens again: searches never block each other by keeping
blocks. When the last beam has reported, the best continuation of each sequence continues in it and further ones fork
from it; to the runner these are sequences that start in the next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from pagemill_engine.scheduler.admission import sequence_id
from pagemill_engine.scheduler.beams import BeamSearch, Continuation
from pagemill_engine.scheduler.order.sorted_sequences import serving_key
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_engine.scheduler.sequences import Sequences
from pagemill_execution.step import TokenLogprobs


class BeamSearches:
    """The beam searches among the sequences of one scheduler."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def take(self, sequence: Sequence, search: BeamSearch[Sequence], candidates: TokenLogprobs | None) -> None:
        """Record that a sequence has computed its tokens and left the batch.

        The last sequence of a search to do so triggers the decision.
        """
        sequence.state = SequenceState.REPORTED
        if self._sequences.kv.has_table(sequence):
            self._sequences.kv.rewind(sequence)
        if self._sequences.kv.has_table(sequence):
            self._sequences.forks[sequence.request_id] = sequence
        if candidates is None:
            self._sequences.fail(sequence, "The step returned no log probabilities for this beam.")
            return
        if not search.report(sequence, candidates):
            return
        continuations = search.decide()
        if continuations:
            self._continue_search(search, continuations)
        elif len(search.pool) < len(search.choices):
            self._sequences.fail(
                sequence, "All candidates of this beam search are stop tokens. Send fewer stop_token_ids."
            )
        else:
            self._sequences.outputs.search(sequence, search)
            self._sequences.free(sequence)

    def between_steps(self) -> list[Sequence]:
        """Return the beams that own blocks and are in no batch: they wait only for the next step."""
        return [sequence for sequence in self._sequences.forks.values() if sequence.search is not None]

    def ready(self) -> list[Sequence]:
        """Return the beams of `between_steps` whose search has decided, in the order of service."""
        return sorted(
            (sequence for sequence in self.between_steps() if sequence.state is SequenceState.WAITING), key=serving_key
        )

    def num_queued(self) -> int:
        """Return how many beams of `between_steps` are in the waiting queue."""
        return sum(sequence.state is SequenceState.WAITING for sequence in self.between_steps())

    def num_reported(self) -> int:
        """Return how many beams wait for other beams of their search."""
        return sum(
            sequence.search is not None and sequence.search.has_pending_beams(sequence)
            for sequence in self._sequences.by_id.values()
        )

    def _continue_search(self, search: BeamSearch[Sequence], continuations: list[Continuation[Sequence]]) -> None:
        sequences: list[Sequence] = []
        for parent in (each.beam.sequence for each in continuations):
            sequences.append(parent if parent not in sequences else self._fork(search, parent))
        for sequence, continuation in zip(sequences, continuations, strict=True):
            sequence.token_ids.append(continuation.token_id)
        for sequence in search.sequences:
            if sequence not in sequences:
                self._sequences.free(sequence)
        search.continue_with(continuations, sequences)
        for sequence in sequences:
            self._sequences.queue(sequence)

    def _fork(self, search: BeamSearch[Sequence], parent: Sequence) -> Sequence:
        number = search.num_sequences_made
        search.num_sequences_made += 1
        child = dataclasses.replace(
            parent,
            request_id=sequence_id(parent.client_request_id, number),
            choice=number,
            token_ids=list(parent.token_ids),
            block_hashes=list(parent.block_hashes),
            num_computed_tokens=0,
            reuse_points=(),
        )
        self._sequences.add(child)
        if self._sequences.kv.has_table(parent):
            self._sequences.fork(parent, child, parent.num_computed_tokens)
        return child


def clash(sequences: Iterable[Sequence], known: Mapping[int, Sequence]) -> bool:
    """Whether a client request's new sequences use numbers of its known ones.

    Two parts of a request clash whenever one is a beam search, because a search adds numbers as it continues.
    """
    return any(sequence.choice in known or (known and sequence.search is not None) for sequence in sequences) or any(
        sequence.search is not None for sequence in known.values()
    )


def sequences_to_abort(
    sequences: Iterable[Sequence], choice: int | None, in_flight: Callable[[Sequence], bool]
) -> list[Sequence]:
    """Return the sequences of one client request that an abort must end.

    A search ends as a whole: with its sequences in flight if there are any, otherwise with one of them.
    """
    mine = [sequence for sequence in sequences if sequence.search is not None or choice in (None, sequence.choice)]
    if not mine or mine[0].search is None:
        return mine
    return [sequence for sequence in mine if in_flight(sequence)] or mine[:1]
