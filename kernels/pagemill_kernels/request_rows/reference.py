"""The formulas of the row operations, request by request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagemill_kernels.request_rows import layout
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowState, RowWrites, StepRows
from pagemill_kernels.sampling import randomness
from pagemill_kernels.sampling.batch import NUM_SETTINGS


def write_rows(state: RowState, writes: RowWrites) -> None:
    for to, source, count in writes.pieces.t().tolist():
        state.values[to : to + count] = writes.values[source : source + count]


def build_inputs(
    state: RowState, step: StepRows, longest: int, num_sampled: int, block_size: int, out: DeviceStepInputs
) -> None:
    settings = out.settings[: NUM_SETTINGS * num_sampled].view(NUM_SETTINGS, num_sampled)
    out.query_start_loc[: len(step.query_start_loc)] = step.query_start_loc
    starts = step.query_start_loc.tolist()
    sampled = step.sample_start_loc.tolist()
    for i, row in enumerate(step.rows.tolist()):
        start, end = starts[i], starts[i + 1]
        record = state.records[row]
        computed = int(record[layout.NUM_COMPUTED_TOKENS])
        seq_len = computed + end - start
        positions = torch.arange(computed, seq_len, device=record.device)
        tables = state.tables[:, row].long()
        blocks = tables[:, positions // block_size]
        out.token_ids[start:end] = state.tokens[row, computed:seq_len]
        out.positions[start:end] = positions
        out.slots[:, start:end] = blocks * block_size + positions % block_size
        out.seq_lens[i] = seq_len
        num_blocks = -(-seq_len // block_size)
        out.block_tables[:, i, :num_blocks] = state.tables[:, row, :num_blocks]
        for offset, place in enumerate(range(sampled[i], sampled[i + 1])):
            out.last_tokens[place] = end - (sampled[i + 1] - place)
            settings[:, place] = _settings(record, offset)


def advance_rows(state: RowState, step: StepRows, sampled: Tensor) -> None:
    counts, widths = step.query_start_loc.diff().tolist(), step.sample_start_loc.diff().tolist()
    for row, count, first, width in zip(
        step.rows.tolist(), counts, step.sample_start_loc.tolist(), widths, strict=False
    ):
        if row == state.layout.padding_row:
            continue
        record = state.records[row]
        record[layout.NUM_COMPUTED_TOKENS] += count
        if not width:
            continue
        num_tokens, num_accepted = int(record[layout.NUM_TOKENS]), 0
        proposed = state.tokens[row, num_tokens : num_tokens + width - 1].tolist()
        while num_accepted < width - 1 and sampled[first + num_accepted] == proposed[num_accepted]:
            num_accepted += 1
        record[layout.NUM_COMPUTED_TOKENS] -= width - 1 - num_accepted
        state.tokens[row, num_tokens + num_accepted] = sampled[first + num_accepted].clamp_min(0)
        record[layout.NUM_TOKENS] += num_accepted + 1


def _settings(record: Tensor, offset: int) -> Tensor:
    found = record.cpu().numpy()
    seed = found[[layout.SEED_LOW, layout.SEED_HIGH]].view(np.uint64)
    position = found[layout.NUM_TOKENS] - found[layout.NUM_PROMPT_TOKENS] + offset
    keys = randomness.keys(seed, found[[layout.CHOICE]].astype(np.int64), np.array([position], dtype=np.int64))
    key = np.concatenate(randomness.halves(keys)).view(np.int32)
    copied = found[layout.DRAW : layout.NUM_FIELDS]
    return torch.from_numpy(np.concatenate([copied, key])).to(record.device)
