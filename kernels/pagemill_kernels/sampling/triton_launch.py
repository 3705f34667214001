"""Samples on a GPU, one program per row; only tokens and log probabilities leave the device.

Each part of a batch's settings is uploaded in one copy. Draws equal the reference's bit for bit, whatever the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from pagemill_kernels.gpu import launch
from pagemill_kernels.sampling import triton_body
from pagemill_kernels.sampling.batch import (
    NUM_SETTINGS,
    Draws,
    Edits,
    Penalties,
    Reports,
    SampledTokens,
    SamplingBatch,
    TokenMasks,
)
from pagemill_kernels.sampling.columns import words
from pagemill_kernels.sampling.device_sample import DeviceSample
from pagemill_kernels.sampling.randomness import halves

BLOCK = 8192
"""Tokens that a program reads at a time, enough to keep the memory busy."""
CUT_BLOCK = 1024
"""Block size of passes that compute more per token, in registers."""
UP_TO_CUT_BLOCK = 4096
"""Block size of the pass that lists the tokens up to a cut. With twice as many, registers spill on sm_90 and sm_100."""
CAPACITY = 16_384
"""Tokens of a row that are listed once most are ruled out; if more are left, the logits are read again."""
PIECE_BLOCK = 1024
"""Tokens of a program if a row is divided into pieces."""
NUM_WARPS = 16
LIST_BLOCK = 128
"""Block size for edits and reports, which are few."""
LIST_PADDING: int = triton_body.LIST_PADDING.value
MAX_VOCAB = 1 << 22
"""The mass of this many tokens fits into 64 bits."""


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample one token for each row of logits, float32 [rows, vocab], contiguous, which stay unchanged."""
    tokens, found = draw_tokens(logits, batch, pack_draws(batch.draws, logits))
    return DeviceSample(tokens.cpu(), None if found is None else (found[0].cpu(), found[1].cpu())).read()


def draw_tokens(logits: Tensor, batch: SamplingBatch, settings: Tensor) -> DeviceSample:
    """Sample like `sample_tokens`, without waiting; `settings` come from `pack_draws`."""
    _check(logits)
    changed = _changed(logits, batch)
    tokens = draw_packed(changed, logits, settings)
    if batch.penalties is not None:
        count(batch.penalties, tokens)
    return DeviceSample(tokens, None if batch.reports is None else report(logits, tokens, batch.reports))


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Forbid tokens in place."""
    device = logits.device
    forbid(logits, launch.upload(masks.rows, device), launch.upload(masks.bits, device, torch.int32))


def forbid(logits: Tensor, rows: Tensor, bits: Tensor, first: int = 0) -> None:
    """Forbid tokens in place. rows, bits: of `TokenMasks`, on the device; first: id of the first column's token."""
    num_tokens = logits.shape[1]
    num_masks, num_words = bits.shape
    if num_words * 32 < first + num_tokens:
        raise ValueError(f"sampling: masks have bits for {num_words * 32} tokens; the logits have {first + num_tokens}")
    triton_body.forbid[(num_masks, triton.cdiv(num_tokens, PIECE_BLOCK))](
        rows_ptr=rows,
        bits_ptr=bits,
        num_words=num_words,
        first=first,
        logits_ptr=logits,
        VOCAB=num_tokens,
        BLOCK=PIECE_BLOCK,
        num_warps=4,
    )


def add_edits(logits: Tensor, edits: Edits) -> None:
    """Add biases in place."""
    num_edits = len(edits.rows)
    triton_body.edit[(triton.cdiv(num_edits, LIST_BLOCK),)](
        edits_ptr=_pack(logits.device, edits.rows, edits.token_ids, edits.biases),
        num_edits=num_edits,
        logits_ptr=logits,
        VOCAB=logits.shape[1],
        BLOCK=LIST_BLOCK,
        enable_fp_fusion=False,
        num_warps=4,
    )


def apply_penalties(logits: Tensor, penalties: Penalties, first: int = 0) -> None:
    """Apply penalties in place. first: id of the first column's token."""
    _check_counts(penalties, logits.shape[1])
    vocab_size = logits.shape[1]
    num_penalised = len(penalties.rows)
    triton_body.penalise[(num_penalised, triton.cdiv(vocab_size, PIECE_BLOCK))](
        penalties_ptr=_pack_penalties(penalties, logits.device),
        num_penalised=num_penalised,
        first=first,
        logits_ptr=logits,
        in_prompt_ptr=penalties.in_prompt.view(torch.uint8),
        in_output_ptr=penalties.in_output,
        VOCAB=vocab_size,
        BLOCK=PIECE_BLOCK,
        enable_fp_fusion=False,
        num_warps=4,
    )


def count(penalties: Penalties, tokens: Tensor, first: int = 0) -> None:
    """Count sampled tokens for penalties. tokens: int64 [batch], -1 for none; first: id of the first column's token."""
    launch.check_types("sampling", torch.int64, tokens=tokens)
    num_penalised = len(penalties.rows)
    triton_body.count_tokens[(num_penalised,)](
        penalties_ptr=_pack_penalties(penalties, tokens.device),
        num_penalised=num_penalised,
        first=first,
        tokens_ptr=tokens,
        in_output_ptr=penalties.in_output,
        VOCAB=penalties.in_output.shape[1],
        num_warps=1,
    )


def draw(logits: Tensor, raw_logits: Tensor, draws: Draws | None) -> Tensor:
    """Return each row's token, int64 [rows]; -1 if the raw logits are not finite. Without draws: the best tokens."""
    return draw_packed(logits, raw_logits, pack_draws(draws, logits))


def pack_draws(draws: Draws | None, logits: Tensor) -> Tensor:
    """Return the settings of `triton_body.draw`, int32 [NUM_SETTINGS, rows], on the logits' device.

    Without draws: the best tokens.
    """
    if draws is None:
        return _pack(logits.device, *np.zeros((NUM_SETTINGS, len(logits)), dtype=np.int32))
    return _pack(logits.device, *words(draws.settings), *halves(draws.keys))


def draw_packed(logits: Tensor, raw_logits: Tensor, settings: Tensor) -> Tensor:
    """Draw with packed settings: int32, contiguous."""
    num_rows, vocab_size = logits.shape
    if settings.dtype != torch.int32 or settings.numel() != NUM_SETTINGS * num_rows:
        raise ValueError(
            f"sampling: settings are {settings.dtype} {list(settings.shape)}; int32 [{NUM_SETTINGS}, {num_rows}] are "
            "needed"
        )
    launch.check_contiguous("sampling", settings=settings, raw_logits=raw_logits)
    launch.check_types("sampling", torch.float32, logits=logits, raw_logits=raw_logits)
    launch.check_shape("sampling", "raw_logits", raw_logits, (num_rows, vocab_size))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    triton_body.draw[(num_rows,)](
        settings_ptr=settings,
        num_rows=num_rows,
        logits_ptr=logits,
        raw_ptr=raw_logits,
        listed_ptr=torch.empty(num_rows, 2 * CAPACITY + LIST_PADDING, dtype=torch.int32, device=logits.device),
        tokens_ptr=tokens,
        VOCAB=vocab_size,
        BLOCK=_block(vocab_size, BLOCK),
        CUT_BLOCK=_block(vocab_size, CUT_BLOCK),
        UP_TO_CUT_BLOCK=_block(vocab_size, UP_TO_CUT_BLOCK),
        CAPACITY=CAPACITY,
        IS_CHANGED=logits is not raw_logits,
        enable_fp_fusion=False,
        num_warps=NUM_WARPS,
    )
    return tokens


def report(raw_logits: Tensor, tokens: Tensor, reports: Reports) -> tuple[Tensor, Tensor]:
    """Return log probabilities and ids, float32 and int32 [reports, 1 + most top tokens].

    The first column is the chosen token's log probability and rank.
    """
    _check(raw_logits)
    launch.check_types("sampling", torch.int64, tokens=tokens)
    launch.check_shape("sampling", "tokens", tokens, (len(raw_logits),))
    rows = launch.upload(reports.rows, raw_logits.device)
    places, asked = rows, tokens[rows].clamp_(min=0)
    if reports.named is not None:
        places = torch.cat([rows, rows[launch.upload(reports.named.places, raw_logits.device)]])
        asked = torch.cat([asked, launch.upload(reports.named.token_ids, raw_logits.device)])
    values, best = raw_logits[places, asked], raw_logits[rows].amax(1)
    part = report_part(raw_logits, rows, reports, best, values[: len(rows)], int(reports.num_top.max()))
    return finished_report(part, reports, best, values)


class PartOfReport(NamedTuple):
    """What some columns contribute to reports."""

    masses: Tensor
    """int64 [reports]."""
    above: Tensor
    """int64 [reports]: how many logits are above the chosen one."""
    top: Tensor
    """float32 [reports, most that are asked for or that there are], descending."""
    top_ids: Tensor
    """int32: columns."""


def report_part(
    logits: Tensor, rows: Tensor, reports: Reports, best: Tensor, chosen: Tensor, width: int
) -> PartOfReport:
    """Search columns of rows that report. best, chosen: float32 [reports], logits of the vocabulary. What is found of
    rows that are not finite is not read."""
    num_reports, num_tokens = len(rows), logits.shape[1]
    width = min(width, num_tokens)
    masses, above = torch.empty(2, num_reports, dtype=torch.int64, device=logits.device)
    top = torch.full((num_reports, width), -torch.inf, device=logits.device)
    top_ids = torch.zeros(num_reports, width, dtype=torch.int32, device=logits.device)
    triton_body.report[(num_reports,)](
        rows_ptr=rows,
        num_top_ptr=launch.upload(reports.num_top, logits.device),
        logits_ptr=logits,
        best_ptr=torch.where(best.isfinite(), best, 0.0),
        chosen_ptr=chosen,
        masses_ptr=masses,
        above_ptr=above,
        values_ptr=top,
        ids_ptr=top_ids,
        width=width,
        VOCAB=num_tokens,
        BLOCK=_block(num_tokens, BLOCK),
        enable_fp_fusion=False,
        num_warps=NUM_WARPS,
    )
    return PartOfReport(masses, above, top, top_ids)


def finished_report(part: PartOfReport, reports: Reports, best: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `report` does. best: of all columns; values: the logits of the chosen tokens, then of named ones."""
    num_reports, num_top = part.top.shape
    device, shape = values.device, (num_reports, 1 + int(reports.widths.max()))
    totals = torch.empty(num_reports, dtype=torch.float32, device=device)
    triton_body.log_of_masses[(triton.cdiv(num_reports, LIST_BLOCK),)](
        masses_ptr=part.masses, num_reports=num_reports, logs_ptr=totals, BLOCK=LIST_BLOCK, enable_fp_fusion=False
    )
    logits, ids = torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int32, device=device)
    logits[:, 0], ids[:, 0] = values[:num_reports], 1 + part.above
    logits[:, 1 : 1 + num_top], ids[:, 1 : 1 + num_top] = part.top, part.top_ids
    if reports.named is not None:
        places, columns, wanted = (launch.upload(each, device) for each in reports.named)
        logits[places, 1 + columns], ids[places, 1 + columns] = values[num_reports:], wanted.int()
    return (logits - best[:, None]) - totals[:, None], ids


def _changed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the logits after masks, edits and penalties.

    It is a copy, because log probabilities are those of the raw logits.
    """
    if batch.masks is None and batch.edits is None and batch.penalties is None:
        return logits
    changed = logits.clone()
    if batch.masks is not None:
        apply_masks(changed, batch.masks)
    if batch.edits is not None:
        add_edits(changed, batch.edits)
    if batch.penalties is not None:
        apply_penalties(changed, batch.penalties)
    return changed


def _pack_penalties(penalties: Penalties, device: torch.device) -> Tensor:
    proposed = np.full(len(penalties.rows), -1) if penalties.proposed is None else penalties.proposed
    return _pack(device, penalties.rows, penalties.count_rows, proposed, *words(penalties.settings))


def _pack(device: torch.device, *arrays: NDArray[np.generic]) -> Tensor:
    """Return int32 [arrays, n] on the device, uploaded in one copy: integers as such, floats by their bits."""
    packed = np.empty((len(arrays), len(arrays[0])), dtype=np.int32)
    for place, array in zip(packed, arrays, strict=True):
        place[:] = array.view(np.int32) if array.dtype in (np.float32, np.uint32) else array
    return launch.upload(packed, device, torch.int32)


def _block(vocab_size: int, largest: int) -> int:
    return min(largest, int(triton.next_power_of_2(vocab_size)))


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"sampling: logits are {logits.dtype} {list(logits.shape)}; float32 [rows, vocab] with up to {MAX_VOCAB} "
            "tokens are sampled"
        )
    launch.check_contiguous("sampling", logits=logits)


def _check_counts(penalties: Penalties, vocab_size: int) -> None:
    launch.check_types("sampling", torch.bool, in_prompt=penalties.in_prompt)
    launch.check_types("sampling", torch.int32, in_output=penalties.in_output)
    for name, table in (("in_prompt", penalties.in_prompt), ("in_output", penalties.in_output)):
        launch.check_shape("sampling", name, table, (len(penalties.in_output), vocab_size))
        launch.check_contiguous("sampling", **{name: table})
