"""What must agree in a scheduler between two steps: rows, the places they are in, clients, block tables and counts.

Asked after a fault, when it is to be known whether the rest can go on. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from pagemill_engine.scheduler.request import Request, RowState

PLACES = (RowState.RUNNING, RowState.WAITING, RowState.HELD, RowState.REPORTED)
"""States whose rows are kept in places of their own."""


def contradictions(
    rows: Mapping[str, Request],
    places: Mapping[RowState, int],
    num_choices: int,
    holders: Collection[str],
    queued_tokens: tuple[int, int],
) -> list[str]:
    """In words; none in a sound scheduler.

    `places`: how many rows are where those of a state belong. `num_choices`: of all clients. `holders`: the rows with
    block tables. `queued_tokens`: what waiting rows are due, and what is counted.
    """
    states = Counter(row.state for row in rows.values())
    faults = [
        f"{count} rows are where {state.name} rows belong, {states[state]} are in that state"
        for state, count in places.items()
        if count != states[state]
    ]
    if num_choices != len(rows):
        faults.append("rows and clients disagree")
    faults += [f"{name} ended and still holds blocks" for name in holders if name not in rows]
    due, counted = queued_tokens
    if due != counted:
        faults.append(f"waiting rows are due {due} tokens, {counted} are counted")
    return faults
