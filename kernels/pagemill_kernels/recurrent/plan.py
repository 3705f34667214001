"""The rows of a step for recurrent layers, as indices that every layer of the step uses.

The tokens of a row since its state (its log, then the step's own) fill groups of one block each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.recurrent.batch import StateBatch


class Round(NamedTuple):
    """The groups that are the n-th of their requests."""

    requests: Tensor
    groups: Tensor
    folded: Tensor
    """Of `requests`, those whose group is full: the state behind it is computed."""
    kept: Tensor
    """Of `folded`, those that are written."""
    slots: Tensor
    """Where `kept` are written."""


class StatePlan(NamedTuple):
    rows: Tensor
    sources: Tensor
    block_size: int
    num_groups: int
    groups: Tensor
    """[tokens]: group of each token."""
    places: Tensor
    """[tokens]: place of each token in its group."""
    log_rows: Tensor
    """[logged tokens], as the next three: row, place in the log, group and place in the group."""
    log_places: Tensor
    log_groups: Tensor
    log_group_places: Tensor
    kept_log: Tensor
    """[logged tokens that stay logged in another place], as the next two: index in the four above, row and place.
    They are behind the last state that is written, and were proposed."""
    kept_log_rows: Tensor
    kept_log_places: Tensor
    rounds: list[Round]
    new_tokens: Tensor
    """[tokens that are logged], as the next two: token, row and place in the log."""
    new_rows: Tensor
    new_places: Tensor
    starts: Tensor
    """[requests]: first token of each."""
    ends: Tensor
    """[requests]: index behind the last token of each."""
    is_behind: Tensor
    """[requests]: whether there are tokens since the state."""
    accepted: Tensor
    """[requests]: `StateBatch.num_accepted`."""
    proposed: Tensor
    """[requests]: `StateBatch.num_proposed`."""
    kept_requests: Tensor
    """[states to write], as the next two: request, its tokens of this step before the boundary, slot."""
    kept_tokens: Tensor
    kept_slots: Tensor


def plan_states(batch: StateBatch) -> StatePlan:
    size, starts, logged = batch.block_size, batch.query_start_loc, batch.num_logged
    counts = np.diff(starts)
    totals = logged + counts
    num_groups = -(-totals // size)
    first_group = np.cumsum(num_groups) - num_groups
    requests = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1] - logged, counts)
    log_requests = np.repeat(np.arange(len(counts)), logged)
    log_places = np.arange(len(log_requests)) - np.repeat(np.cumsum(logged) - logged, logged)
    writer, num_blocks, slots = batch.writes.T
    folded = np.zeros(len(counts), dtype=np.int64)
    np.maximum.at(folded, writer, num_blocks)
    rounds = []
    for number in range(int(num_groups.max())):
        here = np.flatnonzero(num_groups > number)
        # A later group or a slot needs the state behind this one.
        needed = (folded[here] > number) | (num_groups[here] > number + 1)
        written = num_blocks == number + 1
        kept = np.searchsorted(here[needed], writer[written])
        rounds.append(
            Round(*map(_tensor, (here, first_group[here] + number, np.flatnonzero(needed), kept, slots[written])))
        )
    begins = folded * size
    is_new = places >= begins[requests]
    new_requests = requests[is_new]
    is_kept = (begins[log_requests] > 0) & (log_places >= begins[log_requests])
    kept_requests = log_requests[is_kept]
    nothing = np.zeros(len(counts), dtype=np.int64)
    return StatePlan(
        rows=_tensor(batch.rows),
        sources=_tensor(batch.sources),
        block_size=size,
        num_groups=int(num_groups.sum()),
        groups=_tensor(first_group[requests] + places // size),
        places=_tensor(places % size),
        log_rows=_tensor(batch.rows[log_requests]),
        log_places=_tensor(log_places),
        log_groups=_tensor(first_group[log_requests] + log_places // size),
        log_group_places=_tensor(log_places % size),
        kept_log=_tensor(np.flatnonzero(is_kept)),
        kept_log_rows=_tensor(batch.rows[kept_requests]),
        kept_log_places=_tensor(log_places[is_kept] - begins[kept_requests]),
        rounds=rounds,
        new_tokens=_tensor(np.flatnonzero(is_new)),
        new_rows=_tensor(batch.rows[new_requests]),
        new_places=_tensor(places[is_new] - begins[new_requests]),
        starts=_tensor(starts[:-1]),
        ends=_tensor(starts[1:]),
        is_behind=_tensor(logged > 0),
        accepted=_tensor(nothing if batch.num_accepted is None else batch.num_accepted),
        proposed=_tensor(nothing if batch.num_proposed is None else batch.num_proposed),
        kept_requests=_tensor(writer),
        kept_tokens=_tensor(num_blocks * size - logged[writer]),
        kept_slots=_tensor(slots),
    )


class TokenGroups:
    """Arranges the values of tokens by groups, with zeros in the places without a token."""

    def __init__(self, plan: StatePlan) -> None:
        self._plan = plan

    def fill(self, values: Tensor, logged: Tensor | None = None) -> Tensor:
        """Return values, [tokens, heads, ...], as [groups, heads, block_size, ...]. logged: those of logged tokens."""
        plan = self._plan
        out = torch.zeros(plan.num_groups, plan.block_size, *values.shape[1:])
        out[plan.groups, plan.places] = values
        if logged is not None:
            out[plan.log_groups, plan.log_group_places] = logged
        return out.transpose(1, 2)


def log_tokens(log: Tensor, new: Tensor, logged: Tensor, plan: StatePlan) -> None:
    """Write the tokens since the rows' states into their logs. log: [rows, places, values of a token]. new: values of
    the plan's new tokens. logged: values of the logged tokens that the step has read."""
    log[plan.kept_log_rows, plan.kept_log_places] = logged[plan.kept_log]
    log[plan.new_rows, plan.new_places] = new


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
