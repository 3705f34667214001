"""Beam searches among the scheduler's rows: rows wait for each other, then fork, go on or leave as `beams` decided.

A beam that has reported its candidates is in no queue and in no batch, but keeps its blocks; like a fork that has not
started it gives them up when memory is short, and its successors compute their tokens anew. So searches never wait for
each other with blocks in their hands. When the last beam has reported, the best continuation of each row goes on in it
and further ones fork from it: the runner meets them in the next step as rows that start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from pagemill_engine.kv.manager import KVCacheManager
from pagemill_engine.scheduler.admission import row_id
from pagemill_engine.scheduler.beams import BeamSearch, Continuation
from pagemill_engine.scheduler.outputs import OutputBox
from pagemill_engine.scheduler.request import Request, RowState
from pagemill_engine.scheduler.rows import serving_key
from pagemill_engine.scheduler.step import TokenLogprobs


class Searches:
    """Works on the scheduler's own collections; `queue` and `leave` are its ways in and out."""

    def __init__(
        self,
        kv: KVCacheManager,
        outputs: OutputBox,
        rows: dict[str, Request],
        clients: dict[str, dict[int, Request]],
        forks: dict[str, Request],
        queue: Callable[[Request], None],
        leave: Callable[[Request], None],
    ) -> None:
        self._kv = kv
        self._outputs = outputs
        self._rows = rows
        self._clients = clients
        self._forks = forks
        self._queue = queue
        self._leave = leave

    def take(self, row: Request, search: BeamSearch, candidates: TokenLogprobs | None) -> None:
        """A row has computed its tokens and has left the batch; the last one of its search brings the decision."""
        row.state = RowState.REPORTED
        if self._kv.has_table(row):
            self._forks[row.request_id] = row
        if candidates is None:
            self._fail(row, "The step returned no log probabilities for this beam.")
            return
        if not search.report(row, candidates):
            return
        continuations = search.decide()
        if continuations:
            self._go_on(search, continuations)
        elif len(search.pool) < len(search.choices):
            self._fail(row, "The stop tokens leave this search nothing to go on with. Send fewer stop_token_ids.")
        else:
            self._outputs.search(row, search)
            self._leave(row)

    def left(self, row: Request) -> None:
        """A row has left: once the client has heard the end of the search, the others go too."""
        if row.search is None or not row.search.told:
            return
        rows, row.search.beams = row.search.rows, []
        for other in rows:
            self._leave(other)

    def between_steps(self) -> list[Request]:
        """Beams that hold blocks and are in no batch: the next step is all they wait for."""
        return [row for row in self._forks.values() if row.search is not None]

    def ready(self) -> list[Request]:
        """Of these, the ones whose search has decided, in the order of service."""
        return sorted((row for row in self.between_steps() if row.state is RowState.WAITING), key=serving_key)

    def num_queued(self) -> int:
        """Of these, the ones in the waiting queue."""
        return sum(row.state is RowState.WAITING for row in self.between_steps())

    def num_reported(self) -> int:
        """Beams that wait for others of their search."""
        return sum(row.search is not None and row.search.waits_for_others(row) for row in self._rows.values())

    def _fail(self, row: Request, message: str) -> None:
        self._outputs.failure(row, message)
        self._leave(row)

    def _go_on(self, search: BeamSearch, continuations: list[Continuation]) -> None:
        rows: list[Request] = []
        for parent in (each.beam.row for each in continuations):
            rows.append(parent if parent not in rows else self._fork(search, parent))
        for row, continuation in zip(rows, continuations, strict=True):
            row.token_ids.append(continuation.token_id)
        for row in search.rows:
            if row not in rows:
                self._leave(row)
        search.go_on(continuations, rows)
        for row in rows:
            self._queue(row)

    def _fork(self, search: BeamSearch, parent: Request) -> Request:
        number = search.num_rows_made
        search.num_rows_made += 1
        child = dataclasses.replace(
            parent,
            request_id=row_id(parent.client_request_id, number),
            choice=number,
            token_ids=list(parent.token_ids),
            block_hashes=list(parent.block_hashes),
            num_computed_tokens=0,
        )
        self._rows[child.request_id] = self._clients[child.client_request_id][number] = child
        if self._kv.has_table(parent):
            self._kv.fork(parent, child, parent.num_computed_tokens)
            self._forks[child.request_id] = child
        return child


def clash(rows: Iterable[Request], known: Mapping[int, Request]) -> bool:
    """Rows of one client request are told apart by their number; a search gives further numbers as it goes on."""
    return any(row.choice in known or (known and row.search is not None) for row in rows) or any(
        row.search is not None for row in known.values()
    )


def rows_to_abort(rows: Iterable[Request], choice: int | None, in_flight: Callable[[Request], bool]) -> list[Request]:
    """The rows of one client request that an abort must end. A search ends as a whole, and not while a step uses it."""
    mine = [row for row in rows if row.search is not None or choice in (None, row.choice)]
    if not mine or mine[0].search is None:
        return mine
    return [row for row in mine if in_flight(row)] or mine[:1]
