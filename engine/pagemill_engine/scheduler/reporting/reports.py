"""What a scheduler reports about itself: its load after every step, and its inconsistencies after a fault.

Routers and autoscalers read the load. Inconsistencies decide whether the remaining requests can continue: sequences,
queues, clients, block tables and counts must agree between two steps. Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from pagemill_engine.kv.tables import KindUsage
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_protocol.report.state import EngineLoad, KindBytes


def engine_load(
    usage: list[KindUsage],
    running: Collection[Sequence],
    num_waiting: int,
    queued_tokens: int,
    num_preemptions: int,
    num_low_priority: int,
    step_ms: float,
) -> EngineLoad:
    """Return the load of an engine. `queued_tokens`: tokens that waiting sequences have yet to compute."""
    kinds = [bytes_of(each) for each in usage]
    running_tokens, prefilling_tokens = 0, 0
    for sequence in running:
        running_tokens += sequence.num_computed_tokens
        if (due := len(sequence.token_ids) - sequence.num_computed_tokens) > 1:
            prefilling_tokens += due
    return EngineLoad(
        num_kv_bytes_total=sum([each.total for each in kinds]),
        num_kv_bytes_evictable=sum([each.evictable for each in kinds]),
        num_kv_bytes_active=sum([each.active for each in kinds]),
        kind_bytes=kinds if len(kinds) > 1 else [],
        num_requests_running=len(running),
        num_requests_waiting=num_waiting,
        num_tokens_running=running_tokens,
        num_tokens_waiting=queued_tokens + prefilling_tokens,
        step_ms=step_ms,
        num_preemptions=num_preemptions,
        num_low_priority_requests=num_low_priority,
    )


def bytes_of(usage: KindUsage) -> KindBytes:
    size = usage.kind.block_bytes
    return KindBytes(usage.num_blocks * size, usage.num_active * size, usage.num_evictable * size)


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
