"""Launches the row kernels: one launch each for a step's changes, its inputs and its end."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.request_rows import triton_body
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowState, RowWrites, StepRows
from pagemill_kernels.request_rows.staging import PIECE
from pagemill_kernels.sampling.batch import NUM_SETTINGS

BLOCK = 256
"""Tokens of a prompt, or blocks of a table, that a program takes at a time."""


def write_rows(state: RowState, writes: RowWrites) -> None:
    num_pieces = writes.pieces.shape[1]
    if num_pieces == 0:
        return
    launch.check_types("request rows", torch.int64, pieces=writes.pieces)
    launch.check_types("request rows", torch.int32, values=writes.values)
    launch.check_shape("request rows", "pieces", writes.pieces, (3, num_pieces))
    launch.check_contiguous("request rows", pieces=writes.pieces, values=writes.values)
    triton_body.write[(num_pieces,)](
        pieces_ptr=writes.pieces,
        num_pieces=num_pieces,
        values_ptr=writes.values,
        state_ptr=state.values,
        PIECE=PIECE,
        enable_fp_fusion=True,
        num_warps=4,
    )


def build_inputs(
    state: RowState, step: StepRows, longest: int, num_sampled: int, block_size: int, out: DeviceStepInputs
) -> None:
    """Build a step's inputs.

    longest: tokens of the request that has most tokens; num_sampled: number of tokens to sample.
    """
    num_requests = len(step.rows)
    _check_step(step)
    launch.check_contiguous("request rows", block_tables=out.block_tables[0], settings=out.settings)
    launch.check_types("request rows", torch.int32, block_tables=out.block_tables, settings=out.settings)
    layout = state.layout
    tables_shape = (layout.num_kinds, len(out.seq_lens), layout.table_width)
    launch.check_shape("request rows", "block_tables", out.block_tables, tables_shape)
    launch.check_shape("request rows", "slots", out.slots, (layout.num_kinds, len(out.token_ids)))
    room = min(len(out.last_tokens), len(out.settings) // NUM_SETTINGS)
    if len(out.seq_lens) < num_requests or room < num_sampled:
        raise ValueError(
            f"request rows: {num_requests} requests, of which {num_sampled} sample, do not fit into inputs of "
            f"{len(out.seq_lens)} and {room}"
        )
    if num_requests == 0:
        return
    triton_body.build[(num_requests, triton.cdiv(longest, BLOCK))](
        rows_ptr=step.rows,
        query_start_ptr=step.query_start_loc,
        sample_start_ptr=step.sample_start_loc,
        num_sampled=num_sampled,
        records_ptr=state.records,
        tables_ptr=state.tables,
        table_width=layout.table_width,
        tables_stride=state.tables.stride(0),
        tokens_ptr=state.tokens,
        tokens_width=layout.tokens_width,
        token_ids_ptr=out.token_ids,
        positions_ptr=out.positions,
        slots_ptr=out.slots,
        slots_stride=out.slots.stride(0),
        query_start_out_ptr=out.query_start_loc,
        seq_lens_ptr=out.seq_lens,
        tables_out_ptr=out.block_tables,
        tables_out_stride=out.block_tables.stride(0),
        last_tokens_ptr=out.last_tokens,
        settings_ptr=out.settings,
        NUM_KINDS=layout.num_kinds,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
        num_warps=4,
    )


def advance_rows(state: RowState, step: StepRows, sampled: Tensor) -> None:
    """Advance the rows of a step.

    sampled: int64 [sampled]; -1 for none.
    """
    num_requests = len(step.rows)
    _check_step(step)
    launch.check_types("request rows", torch.int64, sampled=sampled)
    if num_requests == 0:
        return
    triton_body.advance[(triton.cdiv(num_requests, BLOCK),)](
        rows_ptr=step.rows,
        query_start_ptr=step.query_start_loc,
        sample_start_ptr=step.sample_start_loc,
        num_requests=num_requests,
        padding_row=state.layout.padding_row,
        sampled_ptr=sampled,
        records_ptr=state.records,
        tokens_ptr=state.tokens,
        tokens_width=state.layout.tokens_width,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
        num_warps=4,
    )


def _check_step(step: StepRows) -> None:
    num_requests = len(step.rows)
    launch.check_types("request rows", torch.int32, **step._asdict())
    launch.check_shape("request rows", "query_start_loc", step.query_start_loc, (num_requests + 1,))
    launch.check_shape("request rows", "sample_start_loc", step.sample_start_loc, (num_requests + 1,))
    launch.check_contiguous("request rows", **step._asdict())
