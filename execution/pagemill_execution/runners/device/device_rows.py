"""Assigns each request a row on the device and stages a plan's changes to the rows.

Only counters are kept here, no token and no block id. The rows themselves are `pagemill_kernels.request_rows`;
`runners.inputs` is the counterpart for runners that keep rows on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.runners.inputs import StateRows
from pagemill_execution.runners.row_adapters import RowAdapters
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.runs import ranges
from pagemill_execution.step import AdmittedSequence, StepPlan
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.request_rows import layout
from pagemill_kernels.request_rows.layout import RowLayout
from pagemill_kernels.request_rows.staging import Staging


class DeviceStep(NamedTuple):
    """One flattened batch, in the order of its plan."""

    request_ids: list[str]
    rows: NDArray[np.int32]
    """[requests]."""
    query_start_loc: NDArray[np.int32]
    """[requests + 1]."""
    sample_start_loc: NDArray[np.int32]
    """[requests + 1]: ranges of the sampled tokens."""
    longest: int
    """Tokens of the request that has most tokens in the step."""
    sampling: NDArray[np.int64]
    """Indices of the requests that sample."""

    @classmethod
    def of_padding(cls, num_tokens: int, num_requests: int, padding_row: int) -> DeviceStep:
        """Return a step of padding requests, none of which samples."""
        nothing, no_tokens = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
        empty = cls([], nothing, no_tokens, no_tokens, 0, nothing.astype(np.int64))
        return empty.padded(num_tokens, num_requests, padding_row)

    @property
    def num_sampled(self) -> int:
        """Number of tokens that may be sampled."""
        return int(self.sample_start_loc[-1])

    @property
    def is_decode(self) -> bool:
        """Whether each request has one token and samples the next."""
        return self.longest == 1 and len(self.sampling) == len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def padded(self, num_tokens: int, num_requests: int, padding_row: int) -> DeviceStep:
        """Return the step padded to the given numbers of tokens and requests.

        Each further request is a padding row, and further tokens are divided evenly among these.
        """
        num_real, num_padding = len(self.rows), num_requests - len(self.rows)
        rows = np.full(num_requests, padding_row, dtype=np.int32)
        rows[:num_real] = self.rows
        samples = np.full(num_requests + 1, self.num_sampled, dtype=np.int32)
        samples[: num_real + 1] = self.sample_start_loc
        starts, begin = np.empty(num_requests + 1, dtype=np.int32), self.num_tokens
        starts[: num_real + 1] = self.query_start_loc
        shares = np.arange(1, num_padding + 1) * (num_tokens - begin) // max(1, num_padding)
        starts[num_real + 1 :] = begin + shares
        most = -(-(num_tokens - begin) // max(1, num_padding))
        longest = max(self.longest, most)
        return self._replace(rows=rows, sample_start_loc=samples, query_start_loc=starts, longest=longest)


class DeviceRows:
    """A fixed number of rows; a request keeps its row from admission to release."""

    def __init__(
        self, row_layout: RowLayout, adapters: RowAdapters | None = None, states: StateRows | None = None
    ) -> None:
        """`states`: of recurrent layers, whose kind is the last one of a plan's tables; None: there are none."""
        self.layout = row_layout
        self._adapters, self._states = adapters, states
        max_rows = row_layout.padding_row
        self.num_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_blocks = np.zeros((row_layout.num_kinds, max_rows), dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))
        self._decode: DeviceStep | None = None
        """The latest decode of these rows; the next step is nearly always the same one."""

    def __len__(self) -> int:
        return len(self._row_of)

    def release(self, request_ids: list[str]) -> list[int]:
        """Free the rows of the requests and return them. Ids without a row are ignored."""
        self._decode = None if request_ids else self._decode
        rows = [self._row_of.pop(request_id) for request_id in request_ids if request_id in self._row_of]
        self._free.extend(rows)
        return rows

    def apply(self, plan: StepPlan, sampling: SamplingRows, staging: Staging) -> None:
        """Stage the plan's differences. Raises RuntimeError if it admits more requests than there are rows.

        Entries that are dropped stay in the tables: GPU kernels read no key before a window.
        """
        for row in self.release(plan.released):
            sampling.release(row)
            if self._adapters is not None:
                self._adapters.release((row,))
        for admitted in plan.admitted:
            self._admit(admitted, sampling, staging)
        if self._states is not None:
            for request_id, index, slot in plan.tables[-1].placed if plan.tables else ():
                self._states.change(self._row_of[request_id], index, slot)
        for kind, changes in enumerate(plan.tables[: self._num_tables(len(plan.tables))]):
            num_blocks = self.num_blocks[kind]
            for request_id, block_ids in changes.appended.items():
                row = self._row_of[request_id]
                staging.put(self.layout.block(row, int(num_blocks[row]), kind), block_ids)
                num_blocks[row] += len(block_ids)
            for request_id, index, block_id in changes.placed:
                staging.put(self.layout.block(self._row_of[request_id], index, kind), [block_id])
        for request_id, proposed in plan.proposals.items():
            row = self._row_of[request_id]
            staging.put(self.layout.token(row, int(self.num_tokens[row])), proposed)

    def _num_tables(self, num_kinds: int) -> int:
        """Return how many of a plan's kinds have block tables here."""
        return num_kinds - (self._states is not None)

    def states_of(self, step: DeviceStep) -> StateBatch | None:
        """Return what a step reads and writes of recurrent layers, and count it as written; None: there are none."""
        if self._states is None:
            return None
        proposed = np.maximum(np.diff(step.sample_start_loc).astype(np.int64) - 1, 0)
        rows, starts = step.rows.astype(np.int64), step.query_start_loc.astype(np.int64)
        return self._states.gather(rows, starts, self.num_computed_tokens, proposed if proposed.any() else None)

    def step(self, plan: StepPlan) -> DeviceStep:
        """Return the plan's step; the previous object, if it is the same step of the same rows."""
        request_ids = list(plan.num_scheduled_tokens)
        num_requests = len(request_ids)
        is_decode = len(plan.samples) == num_requests == plan.num_tokens
        if is_decode and self._decode is not None and self._decode.request_ids == request_ids:
            return self._decode
        step = self._step(plan, request_ids)
        self._decode = step if is_decode else None
        return step

    def _step(self, plan: StepPlan, request_ids: list[str]) -> DeviceStep:
        num_requests = len(request_ids)
        rows = np.fromiter(map(self._row_of.__getitem__, request_ids), np.int32, num_requests)
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int32, num_requests)
        starts = np.zeros(num_requests + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        longest = int(counts.max(initial=0))
        if len(plan.samples) == num_requests and not plan.proposals:
            samples = np.arange(num_requests + 1, dtype=np.int32)
            return DeviceStep(request_ids, rows, starts, samples, longest, np.arange(num_requests))
        widths = [1 + len(plan.proposals.get(name, ())) if name in plan.samples else 0 for name in request_ids]
        samples = np.zeros(num_requests + 1, dtype=np.int32)
        np.cumsum(widths, out=samples[1:])
        return DeviceStep(request_ids, rows, starts, samples, longest, np.flatnonzero(widths))

    def num_generated(self, step: DeviceStep) -> NDArray[np.int64]:
        """Return how many tokens come before each sampled one in its request's output."""
        rows, widths = step.rows[step.sampling], np.diff(step.sample_start_loc)[step.sampling]
        generated = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        places: NDArray[np.int64] = ranges(generated, widths)
        return places

    def advance(self, step: DeviceStep) -> None:
        """Count the step's tokens as computed, without proposed ones, and the token that the device appends to each
        sampling request; `accept` counts those that were proposed."""
        widths = np.diff(step.sample_start_loc)
        self.num_computed_tokens[step.rows] += np.diff(step.query_start_loc) - np.maximum(widths - 1, 0)
        self.num_tokens[step.rows[step.sampling]] += 1

    def accept(self, request_id: str, num_tokens: int) -> None:
        """Count the proposed tokens that a request sampled, unless it has been released since."""
        if request_id in self._row_of:
            row = self._row_of[request_id]
            self.num_tokens[row] += num_tokens
            self.num_computed_tokens[row] += num_tokens

    def row(self, request_id: str) -> int | None:
        """Return a request's row; None: it has none, or has been released since."""
        return self._row_of.get(request_id)

    def _admit(self, admitted: AdmittedSequence, sampling: SamplingRows, staging: Staging) -> None:
        self._decode = None
        row = self._row_of.get(admitted.request_id)
        is_new = row is None
        if row is None:
            if not self._free:
                raise RuntimeError(f"{len(self._row_of)} requests hold all rows; raise max_num_seqs")
            row = self._row_of[admitted.request_id] = self._free.pop()
        self.num_tokens[row] = len(admitted.token_ids)
        self.num_prompt_tokens[row] = admitted.num_prompt_tokens
        self.num_computed_tokens[row] = admitted.num_computed_tokens
        if self._states is not None:
            self._states.admit(row, admitted, is_new=is_new)
        sampling.admit(row, admitted)
        if self._adapters is not None:
            self._adapters.admit(row, admitted.adapter_digest)
        staging.put(self.layout.record(row), _record(row, admitted, sampling))
        for kind, held in enumerate(admitted.tables[: self._num_tables(len(admitted.tables))]):
            self.num_blocks[kind, row] = held.first + len(held.block_ids)
            staging.put(self.layout.block(row, held.first, kind), held.block_ids)
        staging.put(self.layout.token(row, 0), admitted.token_ids)


def _record(row: int, admitted: AdmittedSequence, sampling: SamplingRows) -> NDArray[np.int32]:
    record = np.zeros(layout.NUM_FIELDS, dtype=np.int32)
    record[layout.NUM_TOKENS] = len(admitted.token_ids)
    record[layout.NUM_PROMPT_TOKENS] = admitted.num_prompt_tokens
    record[layout.NUM_COMPUTED_TOKENS] = admitted.num_computed_tokens
    record[layout.CHOICE] = admitted.choice
    one = slice(row, row + 1)
    record[[layout.SEED_LOW, layout.SEED_HIGH]] = sampling.seeds[one].view(np.int32)
    record[layout.DRAW :] = sampling.draws[one].view(np.int32)
    return record
