"""Layout of the rows on the device: one int32 array [records | block tables of each cache kind | tokens], so that one
kernel writes them.

A record contains a request's counters and the columns of `sampling.filters.DRAWS`, floats by their bits. The last row
is the padding row: its block tables contain only the padding block of their kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill_kernels.recurrent.device_batch import StepStates
from pagemill_kernels.sampling.batch import NUM_SETTINGS
from pagemill_kernels.sampling.filters import DRAWS

(
    NUM_TOKENS,
    NUM_PROMPT_TOKENS,
    NUM_COMPUTED_TOKENS,
    CHOICE,
    SEED_LOW,
    SEED_HIGH,
    DRAW,
) = range(7)
"""`DRAW`: the first of the draw's columns."""
NUM_FIELDS = DRAW + len(DRAWS)
RECORD = -(-NUM_FIELDS // 16) * 16
"""Elements from one record to the next."""
ALIGNMENT = 4
"""Elements of 16 bytes. Kernels are specialized for pointers that are multiples of it."""


class RowLayout(NamedTuple):
    num_rows: int
    """Including the padding row."""
    table_width: int
    tokens_width: int
    num_kinds: int = 1
    """Block tables of a row."""
    states_every: int | None = None
    """Tokens of the blocks behind which recurrent layers keep states; None: the model has none."""
    most_proposed: int = 0

    @classmethod
    def of(cls, max_rows: int, max_model_len: int, block_size: int, num_kinds: int = 1) -> RowLayout:
        """Return the layout for these limits. A full row may be sampled from once more."""
        width = aligned(-(-max_model_len // block_size) + 1)
        return cls(max_rows + 1, width, aligned(max_model_len + 1), num_kinds)

    def most_writes(self, num_tokens: int, num_requests: int) -> int | None:
        """Return how many states a step may write: one behind each block that its tokens, or those that were accepted
        before it, complete."""
        size = self.states_every
        return None if size is None else num_tokens // size + num_requests * (2 + self.most_proposed // size)

    @property
    def padding_row(self) -> int:
        return self.num_rows - 1

    @property
    def size(self) -> int:
        return self.token(self.num_rows, 0)

    def record(self, row: int) -> int:
        """Return the index at which the row's record begins."""
        return row * RECORD

    def block(self, row: int, index: int, kind: int = 0) -> int:
        return self.num_rows * RECORD + (kind * self.num_rows + row) * self.table_width + index

    def token(self, row: int, index: int) -> int:
        return self.block(0, 0, self.num_kinds) + row * self.tokens_width + index


class RowState:
    """The rows of one device."""

    def __init__(self, layout: RowLayout, padding_blocks: Sequence[int], device: torch.device) -> None:
        """Create empty rows. `padding_blocks`: of each kind."""
        self.layout = layout
        self.values = torch.zeros(layout.size, dtype=torch.int32, device=device)
        tables, tokens = layout.block(0, 0), layout.token(0, 0)
        self.records = self.values[:tables].view(-1, RECORD)
        self.tables = self.values[tables:tokens].view(layout.num_kinds, -1, layout.table_width)
        self.tokens = self.values[tokens:].view(-1, layout.tokens_width)
        self.pad_with(padding_blocks)

    def pad_with(self, blocks: Sequence[int]) -> None:
        for kind, block in enumerate(blocks):
            self.tables[kind, self.layout.padding_row].fill_(block)


class RowWrites(NamedTuple):
    """Changes of rows. No element is written twice."""

    pieces: Tensor
    """int64 [3, pieces]: destination, index in `values`, and number of elements, up to `PIECE`."""
    values: Tensor
    """int32."""


class StepRows(NamedTuple):
    """The requests of a step; all tensors are int32, on the device."""

    rows: Tensor
    """[requests]."""
    query_start_loc: Tensor
    """[requests + 1]."""
    sample_start_loc: Tensor
    """[requests + 1]: ranges of the sampled tokens. A request that samples has one, and one more for each proposed
    token, which are the last of its tokens in the step."""


@dataclass(slots=True, frozen=True)
class DeviceStepInputs:
    """Inputs of a forward pass and of the sampler, all on the device. They may be longer than a step needs."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    slots: Tensor
    """int64 [kinds, tokens]: block id * block_size + offset."""
    query_start_loc: Tensor
    """int32 [requests + 1]."""
    seq_lens: Tensor
    """int32 [requests]: context plus this step's tokens."""
    block_tables: Tensor
    """int32 [kinds, requests, blocks]; values beyond a request's length or before its window are meaningless."""
    last_tokens: Tensor
    """int64 [sampled]: index of the token in the step behind which each token is sampled."""
    settings: Tensor
    """int32 [NUM_SETTINGS * sampled], one setting after another."""
    states: StepStates | None = None
    """None: no layer is recurrent."""

    @classmethod
    def empty(
        cls, num_tokens: int, num_requests: int, num_sampled: int, layout: RowLayout, device: torch.device
    ) -> DeviceStepInputs:
        most = layout.most_writes(num_tokens, num_requests)
        kinds, width = layout.num_kinds, layout.table_width
        ids = torch.empty(2 + kinds, aligned(num_tokens), dtype=torch.int64, device=device)
        return cls(
            token_ids=ids[0, :num_tokens],
            positions=ids[1, :num_tokens],
            slots=ids[2:, :num_tokens],
            query_start_loc=torch.empty(num_requests + 1, dtype=torch.int32, device=device),
            seq_lens=torch.empty(num_requests, dtype=torch.int32, device=device),
            block_tables=torch.empty(kinds, num_requests, width, dtype=torch.int32, device=device),
            last_tokens=torch.empty(num_sampled, dtype=torch.int64, device=device),
            settings=torch.empty(NUM_SETTINGS * num_sampled, dtype=torch.int32, device=device),
            states=None if most is None else StepStates.empty(num_requests, most, device),
        )

    def first(self, num_tokens: int, num_requests: int) -> DeviceStepInputs:
        """Return the inputs of the first tokens and requests, with those of all sampling requests."""
        return DeviceStepInputs(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slots=self.slots[:, :num_tokens],
            query_start_loc=self.query_start_loc[: num_requests + 1],
            seq_lens=self.seq_lens[:num_requests],
            block_tables=self.block_tables[:, :num_requests],
            last_tokens=self.last_tokens,
            settings=self.settings,
            states=None if self.states is None else self.states.first(num_requests),
        )


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
