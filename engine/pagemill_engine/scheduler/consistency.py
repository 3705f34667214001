"""Checks a scheduler between two steps: sequences, queues, clients, block tables and counts must agree.

It is called after a fault, to find out whether the remaining requests can continue. It changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from pagemill_engine.scheduler.sequence import Sequence, SequenceState

QUEUED_STATES = (SequenceState.RUNNING, SequenceState.WAITING, SequenceState.WAITING_FOR_FORK, SequenceState.REPORTED)
"""States whose sequences are kept in collections of their own."""


def inconsistencies(
    sequences: Mapping[str, Sequence],
    places: Mapping[SequenceState, int],
    num_choices: int,
    holders: Collection[str],
    queued_tokens: tuple[int, int],
) -> list[str]:
    """Return one message per inconsistency; an empty list means that the scheduler is consistent.

    `places`: the number of sequences in the collection of each state. `num_choices`: the sequences of all clients.
    `holders`: the sequences that have block tables. `queued_tokens`: the tokens that waiting sequences have yet to
    compute, and the scheduler's count of them.
    """
    states = Counter(sequence.state for sequence in sequences.values())
    faults = [
        f"{count} sequences are where {state.name} sequences belong, {states[state]} are in that state"
        for state, count in places.items()
        if count != states[state]
    ]
    if num_choices != len(sequences):
        faults.append("sequences and clients disagree")
    faults += [f"{name} ended and still holds blocks" for name in holders if name not in sequences]
    due, counted = queued_tokens
    if due != counted:
        faults.append(f"waiting sequences are due {due} tokens, {counted} are counted")
    return faults
