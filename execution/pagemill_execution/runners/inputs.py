"""The persistent rows of the CPU runner: arrays with the state of each admitted request.

A plan's differences are applied to the rows, and a step's inputs are gathered from them with array operations: no
Python loop runs over tokens. Block ids and tokens come from the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.sampling.runs import ranges
from pagemill_execution.step import AdmittedSequence, StepPlan
from pagemill_kernels.recurrent.batch import StateBatch


class StepInputs(NamedTuple):
    """One flattened batch: requests with one token, by context length, followed by the prefill chunks."""

    request_ids: list[str]
    rows: NDArray[np.int64]
    """[requests]: each request's persistent row."""
    token_ids: NDArray[np.int64]
    """[tokens]."""
    positions: NDArray[np.int64]
    """[tokens]."""
    slots: list[NDArray[np.int64]]
    """By cache kind, [tokens]: block id * block_size + offset."""
    query_start_loc: NDArray[np.int64]
    """[requests + 1]."""
    seq_lens: NDArray[np.int64]
    """[requests]: tokens with KV after this step."""
    block_tables: list[NDArray[np.int32]]
    """By cache kind, [requests, blocks in use by the longest]."""
    sampling: NDArray[np.int64]
    """Indices of the sampling requests in `request_ids`."""
    num_proposed: NDArray[np.int64] | None = None
    """[sampling requests]: proposed tokens, which are the last of the request's tokens; None: no request has some."""

    @property
    def proposed(self) -> NDArray[np.int64] | None:
        """Proposed tokens of all requests, as `num_proposed` has them of those that sample."""
        if self.num_proposed is None:
            return None
        found = np.zeros(len(self.rows), dtype=np.int64)
        found[self.sampling] = self.num_proposed
        return found

    @property
    def sampled_tokens(self) -> NDArray[np.int64]:
        """Indices of the tokens behind which a request samples, in the order of `sampling`."""
        last = self.query_start_loc[1:][self.sampling] - 1
        if self.num_proposed is None:
            return last
        return ranges(last - self.num_proposed, 1 + self.num_proposed)


class RequestRows:
    """A fixed number of rows; a request keeps its row from admission to release."""

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, padding_blocks: Sequence[int] = (0,)
    ) -> None:
        """Create free rows. `padding_blocks`: of each cache kind, the block in place of those that are not needed."""
        self.block_size = block_size
        self._padding_blocks = padding_blocks
        self.token_ids = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        width = -(-max_model_len // block_size) + 1
        self.block_tables = [np.zeros((max_rows, width), dtype=np.int32) for _ in padding_blocks]
        self.num_blocks = [np.zeros(max_rows, dtype=np.int64) for _ in padding_blocks]
        self.num_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_rows, dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def blocks(self, row: int) -> list[NDArray[np.int64]]:
        """The row's block ids of each cache kind, int64 [blocks]."""
        tables = zip(self.block_tables, self.num_blocks, strict=True)
        return [table[row, : counts[row]].astype(np.int64) for table, counts in tables]

    def release(self, request_ids: list[str]) -> list[int]:
        """Free the rows of the requests and return them. Ids without a row are ignored."""
        rows = [self._row_of.pop(request_id) for request_id in request_ids if request_id in self._row_of]
        self._free.extend(rows)
        return rows

    def admit(self, admitted: AdmittedSequence) -> int:
        """Fill a row and return its index. Raises RuntimeError if there are more requests than rows."""
        row = self._row_of.get(admitted.request_id)
        if row is None:
            if not self._free:
                raise RuntimeError(f"{len(self._row_of)} requests hold all rows; raise max_num_seqs")
            row = self._row_of[admitted.request_id] = self._free.pop()
        num_tokens = len(admitted.token_ids)
        self.token_ids[row, :num_tokens] = admitted.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = admitted.num_prompt_tokens
        self.num_computed_tokens[row] = admitted.num_computed_tokens
        of_kinds = zip(self.block_tables, self.num_blocks, self._padding_blocks, admitted.tables, strict=False)
        for table, counts, padding, held in of_kinds:  # a kind of states comes last and is `StateRows`'
            end = counts[row] = held.first + len(held.block_ids)
            table[row, : held.first] = padding
            table[row, held.first : end] = held.block_ids
        return row

    def update_blocks(self, plan: StepPlan) -> None:
        for changes, table, counts, padding in zip(
            plan.tables, self.block_tables, self.num_blocks, self._padding_blocks, strict=False
        ):
            for request_id, block_ids in changes.appended.items():
                row = self._row_of[request_id]
                start = counts[row]
                table[row, start : start + len(block_ids)] = block_ids
                counts[row] = start + len(block_ids)
            for request_id, index, block_id in changes.placed:
                table[self._row_of[request_id], index] = block_id
            for request_id, first, end in changes.dropped:
                if (known := self._row_of.get(request_id)) is not None:
                    table[known, first:end] = padding

    def gather(self, plan: StepPlan) -> StepInputs:
        """Return the step's inputs."""
        for request_id, proposed in plan.proposals.items():
            row = self._row_of[request_id]
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(proposed)] = proposed
        request_ids = list(plan.num_scheduled_tokens)
        num_requests = len(request_ids)
        rows = np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64, num_requests)
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, num_requests)
        order = np.lexsort((self.num_computed_tokens[rows], counts > 1))
        rows, counts = rows[order], counts[order]
        request_ids = [request_ids[i] for i in order.tolist()]

        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        computed = self.num_computed_tokens[rows]
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], counts)
        indices, offsets = np.divmod(positions, self.block_size)
        seq_lens = computed + counts
        width = -(-int(seq_lens.max()) // self.block_size)
        return StepInputs(
            request_ids=request_ids,
            rows=rows,
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=[
                table[token_rows, indices].astype(np.int64) * self.block_size + offsets for table in self.block_tables
            ],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=[table[rows, :width] for table in self.block_tables],
            sampling=(sampling := _sampling(request_ids, plan.samples)),
            num_proposed=_num_proposed(request_ids, sampling, plan.proposals) if plan.proposals else None,
        )

    def advance(
        self, inputs: StepInputs, last_tokens: NDArray[np.int64], num_accepted: NDArray[np.int64] | None = None
    ) -> None:
        """Count the step's tokens as computed and append the sampled ones, in the order of `inputs.sampling`.

        last_tokens: each request's last sampled token. num_accepted: its proposed tokens before that, which it sampled.
        """
        self.num_computed_tokens[inputs.rows] = inputs.seq_lens
        num_rejected = None
        if num_accepted is not None and inputs.num_proposed is not None:
            num_rejected = inputs.num_proposed - num_accepted
        self.append(inputs.rows[inputs.sampling], last_tokens, num_accepted, num_rejected)

    def append(
        self,
        rows: NDArray[np.int64],
        last_tokens: NDArray[np.int64],
        num_accepted: NDArray[np.int64] | None = None,
        num_rejected: NDArray[np.int64] | None = None,
    ) -> None:
        """Append sampled tokens to rows whose step's tokens count as computed; arguments as for `advance`.

        num_rejected: proposed tokens that were not sampled; None: no row has proposed ones.
        """
        if num_accepted is not None and num_rejected is not None:
            self.num_computed_tokens[rows] -= num_rejected
            self.num_tokens[rows] += num_accepted
        self.token_ids[rows, self.num_tokens[rows]] = last_tokens
        self.num_tokens[rows] += 1


class StateRows:
    """The state of recurrent layers that each row has, and where its next step writes new ones. It follows plans as
    docs/reference/how-a-step-is-described.md says; states and logs are in the cache (`kv_cache`)."""

    def __init__(self, max_rows: int, block_size: int, zero_slot: int) -> None:
        """Create rows without a state. `zero_slot`: of the state of no token."""
        self._block_size, self._zero_slot = block_size, zero_slot
        self._boundaries = np.zeros(max_rows, dtype=np.int64)
        """Blocks behind which each row has its state."""
        self._slots = np.full(max_rows, zero_slot, dtype=np.int64)
        self._num_known = np.zeros(max_rows, dtype=np.int64)
        """Tokens of each row that its last step did not only propose, or with which the row began."""
        self._writes: dict[int, list[tuple[int, int]]] = {}
        """By row, the states that its next step writes: blocks behind which they are, and slots."""

    def admit(self, row: int, admitted: AdmittedSequence, *, is_new: bool) -> None:
        """`is_new`: whether the row begins; else it keeps its state, which accepted tokens may have passed by more than
        a block."""
        first, block_ids = admitted.tables[-1].first, admitted.tables[-1].block_ids
        if is_new:
            self._boundaries[row] = admitted.num_computed_tokens // self._block_size
            self._num_known[row] = admitted.num_computed_tokens
        boundary = int(self._boundaries[row])
        self._slots[row] = block_ids[boundary - 1 - first] if boundary else self._zero_slot
        behind = enumerate(block_ids, first + 1)
        self._writes[row] = [(number, slot) for number, slot in behind if number > boundary and slot >= 0]

    def change(self, row: int, index: int, slot: int) -> None:
        """Note a state that the row's next step writes, or where the one that it has was moved."""
        if index >= self._boundaries[row]:
            self._writes[row].append((index + 1, slot))
        elif index == self._boundaries[row] - 1:
            self._slots[row] = slot

    def gather(
        self,
        rows: NDArray[np.int64],
        query_start_loc: NDArray[np.int64],
        num_computed: NDArray[np.int64],
        proposed: NDArray[np.int64] | None,
    ) -> StateBatch:
        """Return what a step of these rows reads and writes, and count it as written. `num_computed`: of all rows.
        `proposed`: of the step's tokens of each, the last ones, which may be taken back."""
        boundaries, computed = self._boundaries[rows], num_computed[rows]
        accepted = computed - self._num_known[rows]
        self._num_known[rows] = computed + np.diff(query_start_loc) - (0 if proposed is None else proposed)
        sources = self._slots[rows]
        writes: list[tuple[int, int, int]] = []
        for request, row in enumerate(rows.tolist()):
            if own := self._writes[row]:
                writes += [(request, number - int(boundaries[request]), slot) for number, slot in own]
                self._boundaries[row], self._slots[row] = own[-1]
                self._writes[row] = []
        return StateBatch(
            rows,
            query_start_loc,
            sources,
            computed - boundaries * self._block_size,
            np.array(writes, dtype=np.int64).reshape(-1, 3),
            self._block_size,
            accepted if accepted.any() else None,
            proposed,
            computed,
        )


def _sampling(request_ids: list[str], samples: set[str]) -> NDArray[np.int64]:
    """Return the indices of the requests that sample: all, unless some are in the middle of their prompts."""
    if len(samples) == len(request_ids):
        return np.arange(len(request_ids), dtype=np.int64)
    return np.array([i for i, name in enumerate(request_ids) if name in samples], dtype=np.int64)


def _num_proposed(
    request_ids: list[str], sampling: NDArray[np.int64], proposals: dict[str, list[int]]
) -> NDArray[np.int64]:
    return np.array([len(proposals.get(request_ids[i], ())) for i in sampling.tolist()], dtype=np.int64)
