"""Sampling by native code: draws the same tokens as `reference`, its specification, at a fraction of its time.

One call takes a step's rows. Log probabilities are within float32's rounding of the reference's, whose library sums in
another order; named tokens are looked up here.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pagemill_kernels.arrays import Array, address
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.sampling import reference
from pagemill_kernels.sampling.batch import (
    Draws,
    Edits,
    Logprobs,
    Penalties,
    Reports,
    SampledTokens,
    SamplingBatch,
    TokenMasks,
)
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES

logger = logging.getLogger(__name__)

NATIVE_ELEMENTS = 1 << 20
"""Number of logits below which numpy finds each row's best token sooner than a call's arguments are built."""

Floats = NDArray[np.float32]


@cache
def is_current() -> bool:
    """Whether the loaded library computes with the columns that are declared; reports it if it does not."""
    declared = f"{DRAWS.description}\n{PENALTIES.description}"
    compiled: str = launch.native().pagemill_sampling_columns().decode()
    if compiled != declared:
        logger.warning(
            "Native sampling is not used: the compiled columns (%s) are not the declared ones (%s). Without it numpy "
            "samples, slower. Reinstall pagemill-kernels.",
            ", ".join(compiled.split("\n")),
            ", ".join(declared.split("\n")),
        )
    return compiled == declared


def sample_tokens(logits: Floats, batch: SamplingBatch) -> SampledTokens:
    """Sample one token for each row of logits, contiguous [rows, vocab]."""
    if batch.is_plain and logits.size < NATIVE_ELEMENTS:
        return reference.sample_tokens(logits, batch)
    num_rows = len(logits)
    call = _Call(logits)
    if batch.draws is not None:
        call.set_draws(batch.draws)
    if batch.masks is not None:
        call.set_masks(batch.masks)
    if batch.edits is not None:
        call.set_edits(batch.edits)
    if batch.penalties is not None:
        call.set_penalties(batch.penalties)
    if batch.reports is not None:
        call.set_reports(batch.reports)
    token_ids, finite = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.bool_)
    call.set(token_ids=token_ids, finite=finite)
    launch.native().pagemill_sample(call.arguments)
    logprobs = None if batch.reports is None else call.logprobs(batch.reports)
    return SampledTokens(token_ids, finite, logprobs)


def report(raw_logits: Floats, token_ids: NDArray[np.int64], reports: Reports) -> Logprobs:
    """Return log probabilities. raw_logits: of the reports' rows; token_ids: of the whole batch."""
    call = _Call(raw_logits)
    call.set_reports(reports._replace(rows=np.arange(len(reports.rows))))
    call.set(token_ids=token_ids[reports.rows])
    launch.native().pagemill_report(call.arguments)
    return call.logprobs(reports._replace(rows=np.arange(len(reports.rows))))


class _Call:
    """The arguments of one call, and the arrays to which they point."""

    def __init__(self, logits: Floats) -> None:
        self._logits = np.ascontiguousarray(logits, dtype=np.float32)
        self._held: list[Array] = []
        self.arguments = library.SamplingArgs(
            num_rows=logits.shape[0], vocab_size=logits.shape[1], num_threads=launch.num_threads()
        )
        self.set(logits=self._logits)

    def set(self, **arrays: Array) -> None:
        for name, array in arrays.items():
            held = np.ascontiguousarray(array)
            self._held.append(held)
            setattr(self.arguments, name, address(held))

    def set_draws(self, draws: Draws) -> None:
        self.set(draws=draws.settings, keys=draws.keys)

    def set_masks(self, masks: TokenMasks) -> None:
        self.arguments.mask_words = masks.bits.shape[1]
        self.set(mask_of=self._places(masks.rows), masks=masks.bits)

    def set_edits(self, edits: Edits) -> None:
        order = edits.rows.argsort(kind="stable")
        starts = np.searchsorted(edits.rows[order], np.arange(len(self._logits) + 1))
        self.set(edit_starts=starts, edit_tokens=edits.token_ids[order], edit_biases=edits.biases[order])

    def set_penalties(self, penalties: Penalties) -> None:
        self.set(
            penalty_of=self._places(penalties.rows),
            penalties=penalties.settings,
            count_rows=penalties.count_rows,
        )
        self.arguments.in_prompt = address(penalties.in_prompt)
        self.arguments.in_output = address(penalties.in_output)

    def set_reports(self, reports: Reports) -> None:
        num_reports, width = len(reports.rows), int(reports.num_top.max())
        self.chosen, self.best, self.log_totals = (np.empty(num_reports, dtype=np.float32) for _ in range(3))
        self.ranks = np.empty(num_reports, dtype=np.int64)
        self.top = np.empty((num_reports, width), dtype=np.float32)
        self.top_ids = np.empty((num_reports, width), dtype=np.int64)
        self.arguments.top_width = width
        self.set(report_of=self._places(reports.rows), chosen=self.chosen, best=self.best)
        self.set(log_totals=self.log_totals, ranks=self.ranks, top=self.top, top_ids=self.top_ids)

    def logprobs(self, reports: Reports) -> Logprobs:
        """Return log probabilities. Call this after the native call."""
        top, top_ids = self.top, self.top_ids
        if reports.named is not None:
            places, columns, token_ids = reports.named
            extra = ((0, 0), (0, int(reports.widths.max()) - top.shape[1]))
            top, top_ids = np.pad(top, extra), np.pad(top_ids, extra)
            top[places, columns], top_ids[places, columns] = (
                self._logits[reports.rows[places], token_ids],
                token_ids,
            )
        best, total = self.best, self.log_totals
        with np.errstate(invalid="ignore"):  # rows that are not finite are never read
            return Logprobs(self.chosen - best - total, self.ranks, top - best[:, None] - total[:, None], top_ids)

    def _places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each batch row's index in `rows`, -1 if it is absent."""
        places = np.full(len(self._logits), -1, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        return places
