"""Logits that ranks of several nodes divide: rank 0 samples without gathering them, where a part of each says enough.

The other ranks of its stage, whose heads have other columns, send their best tokens, and then answer what rank 0 asks
for until it asks for nothing more (`pagemill_kernels.sampling.parts`): the best tokens of rows that masks, biases or
penalties change, draws and candidates of some rows, log probabilities, and whole rows where candidates do not decide.
Rank 0 alone knows which. On one node all write into one array (`ranks.shared_logits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.step_model import StepModel, WrappedModel
from pagemill_execution.runners.eager import EagerRunner
from pagemill_execution.runners.prompt_logprobs import PromptRows
from pagemill_execution.sampling.runs import ranges
from pagemill_execution.sampling.sampler import Mask, Sampled, by_row, mask_rows
from pagemill_kernels.arrays import Array
from pagemill_kernels.sampling.batch import Draws, Logprobs, Reports, SampledTokens, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.filters import DRAWS, is_drawn
from pagemill_kernels.sampling.host import host_sampler
from pagemill_kernels.sampling.parts import (
    CHANGES,
    BestTokens,
    Changes,
    PartOfReports,
    PartOfRows,
    best_of_all,
    best_tokens,
    changed,
    changed_rows,
    changes_of,
    decide,
    logprobs_of,
    num_above,
    part_of_reports,
    part_of_rows,
)
from pagemill_kernels.sampling.reference import count
from pagemill_models.sharding.slices import dealt

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
_NO_ROWS: Rows = np.zeros(0, dtype=np.int64)
Question = Literal["nothing more", "changed", "draws", "reports", "above", "whole"]
"""`changed`: the best tokens of rows whose logits are changed; `draws`: of rows that draw; `reports`: log
probabilities; `above`: how many logits are above given ones; `whole`: all logits of rows."""
_QUESTIONS = get_args(Question)
_ARRAYS: dict[Question, tuple[np.dtype[Any], ...]] = {
    "nothing more": (),
    "changed": CHANGES,
    "draws": (np.dtype(np.int64), DRAWS.dtype, np.dtype(np.uint64), np.dtype(np.float32)),
    "reports": tuple(map(np.dtype, (np.int64, np.float32, np.int64, np.int64, np.int64))),
    "above": (np.dtype(np.int64), np.dtype(np.float32)),
    "whole": (np.dtype(np.int64),),
}
"""The arrays that are asked with."""
_HEAD = 1 + max(map(len, _ARRAYS.values()))


class LogitsGroup(Protocol):
    """What exchanges parts of logits among the ranks of the last stage, of which rank 0 is the first."""

    rank: int
    members: int

    def give(self, values: Array, to: Sequence[int]) -> None: ...

    def take(self, into: Mapping[int, Array]) -> None:
        """Fill arrays from other ranks. Raises `GroupAborted`."""
        ...


class _OwnRows:
    """The logits of a rank's columns, of which some rows are changed."""

    def __init__(self, raw: Array, first: int) -> None:
        self.raw, self.first = raw, first
        self._rows, self._changed = _NO_ROWS, raw[:0]

    def change(self, changes: Changes) -> BestTokens:
        """Change rows. Returns their best tokens."""
        self._rows, self._changed = changes.rows, changed(self.raw, changes)
        return best_tokens(self._changed, self.first)

    def at(self, rows: Rows) -> Array:
        """Return some rows, changed where they are."""
        found = self.raw[rows]
        if len(self._rows):
            places = np.searchsorted(self._rows, rows).clip(max=len(self._rows) - 1)
            is_changed = self._rows[places] == rows
            found[is_changed] = self._changed[places[is_changed]]
        return found


class DividedLogits:
    def __init__(self, group: LogitsGroup, vocab_size: int) -> None:
        self._group, self._vocab_size = group, vocab_size
        self._columns = dealt(vocab_size, group.members)
        self._sizes = [end - first for first, end in self._columns]
        self._others = list(range(1, group.members))
        self.num_bytes = 0
        """Bytes that rank 0 has taken."""

    def answer(self, logits: Array) -> None:
        """Let rank 0 sample. logits: [rows, columns of this rank]."""
        own = _OwnRows(logits, self._columns[self._group.rank][0])
        self._give(best_tokens(logits, own.first))
        while True:
            question, arrays = self._read_question()
            if question == "nothing more":
                return
            if question == "changed":
                self._give(own.change(Changes(*arrays)))
            elif question == "draws":
                rows, settings, keys, best = arrays
                part = part_of_rows(own.at(rows), own.first, self._vocab_size, Draws(settings, keys), best)
                self._give((part.sums, part.token_ids, part.masses, part.counts))
                self._give((part.candidates,))
            elif question == "reports":
                rows, best, (width,), places, token_ids = arrays
                self._give(part_of_reports(own.raw[rows], own.first, best, int(width), (places, token_ids)))
            elif question == "above":
                rows, values = arrays
                self._give((num_above(own.raw[rows], values),))
            else:
                self._give((own.raw[arrays[0]],))

    def whole(self, logits: Array) -> Array:
        """Return all columns of rank 0's rows."""
        self._best(logits)
        found = self._whole(_OwnRows(logits, 0), np.arange(len(logits)))
        self._ask("nothing more")
        return found

    def sample(self, logits: Array, batch: SamplingBatch) -> SampledTokens:
        """Sample a token for each of rank 0's rows, the same as from all of their logits."""
        own, raw_best = _OwnRows(logits, 0), self._best(logits)
        finite = np.isfinite(raw_best.values)
        best = BestTokens(raw_best.values.copy(), raw_best.token_ids.copy())
        rows = changed_rows(batch)
        if len(rows):
            best.values[rows], best.token_ids[rows] = self._changed(own, rows, batch)
        token_ids = best.token_ids.copy()
        undecided = _NO_ROWS
        if batch.draws is not None:
            may_draw = is_drawn(batch.draws.settings) & finite & (best.values > -np.inf)
            drawn = np.flatnonzero(may_draw)
            if len(drawn):
                token_ids[drawn] = self._draw(own, drawn, batch.draws.at(drawn), best.values[drawn])
                undecided = drawn[token_ids[drawn] < 0]
        if len(undecided):
            assert batch.draws is not None
            draws = SamplingBatch(draws=batch.draws.at(undecided))
            token_ids[undecided] = host_sampler().sample_tokens(self._whole(own, undecided), draws).token_ids
        if batch.penalties is not None:
            count(batch.penalties, token_ids)
        logprobs = None
        if batch.reports is not None:
            logprobs = self._reports(logits, raw_best.values, token_ids, batch.reports)
        self._ask("nothing more")
        return SampledTokens(token_ids, finite, logprobs)

    def report(self, logits: Array, token_ids: Rows, reports: Reports) -> Logprobs:
        """Return log probabilities of tokens of rank 0's rows, the same as from all of their logits."""
        best = self._best(logits)
        found = self._reports(logits, best.values, token_ids, reports)
        self._ask("nothing more")
        return found

    def _best(self, own: Array) -> BestTokens:
        return best_of_all([best_tokens(own, 0), *self._taken_best(len(own))])

    def _taken_best(self, num_rows: int) -> list[BestTokens]:
        taken = self._take([[(np.float32, num_rows), (np.int64, num_rows)]] * len(self._others))
        return [BestTokens(*each) for each in taken]

    def _changed(self, own: _OwnRows, rows: Rows, batch: SamplingBatch) -> BestTokens:
        """Let all ranks change rows. Returns their best tokens."""
        mine, *others = [changes_of(batch, rows, *columns) for columns in self._columns]
        self._ask("changed", *others)
        return best_of_all([own.change(mine), *self._taken_best(len(rows))])

    def _draw(self, own: _OwnRows, drawn: Rows, draws: Draws, best: Floats) -> Rows:
        self._ask("draws", (drawn, draws.settings, draws.keys, best))
        mine = part_of_rows(own.at(drawn), 0, self._vocab_size, draws, best)
        form: list[tuple[Any, int]] = [(np.float32, len(drawn)), *[(np.int64, len(drawn))] * 3]
        taken = self._take([form] * len(self._others))
        candidates = self._take([[(np.uint64, int(each[3].sum()))] for each in taken])
        others = [PartOfRows(*each, *keys) for each, keys in zip(taken, candidates, strict=True)]
        return decide([mine, *others], self._sizes, draws)

    def _reports(self, logits: Array, best: Floats, token_ids: Rows, reports: Reports) -> Logprobs:
        """Return log probabilities. token_ids, best: of all rows."""
        rows, width, num = reports.rows, int(reports.num_top.max()), len(reports.rows)
        places, asked = np.arange(num), token_ids[rows]
        if reports.named is not None:
            places = np.concatenate([places, reports.named.places])
            asked = np.concatenate([asked, reports.named.token_ids])
        self._ask("reports", (rows, best[rows], np.array([width]), places, asked))
        is_in = [(asked >= first) & (asked < end) for first, end in self._columns]
        forms = [
            [(np.int64, num), *((each, num * min(width, size)) for each in (np.float32, np.int64)), (np.float32, held)]
            for size, held in zip(self._sizes[1:], (int(each.sum()) for each in is_in[1:]), strict=True)
        ]
        parts = [part_of_reports(logits[rows], 0, best[rows], width, (places, asked))]
        for masses, top, top_ids, values in self._take(forms):
            parts.append(PartOfReports(masses, top.reshape(num, -1), top_ids.reshape(num, -1), values))
        found = np.zeros(len(asked), dtype=np.float32)
        for part, held in zip(parts, is_in, strict=True):
            found[held] = part.values
        self._ask("above", (rows, found[:num]))
        counts = [num_above(logits[rows], found[:num])]
        counts += [each for (each,) in self._take([[(np.int64, num)]] * len(self._others))]
        return logprobs_of(parts, reports, best[rows], found, 1 + np.sum(counts, axis=0))

    def _whole(self, own: _OwnRows, rows: Rows) -> Array:
        self._ask("whole", (rows,))
        found = np.empty((len(rows), self._vocab_size), dtype=np.float32)
        found[:, : self._sizes[0]] = own.at(rows)
        taken = self._take([[(np.float32, len(rows) * size)] for size in self._sizes[1:]])
        for (values,), (first, end) in zip(taken, self._columns[1:], strict=True):
            found[:, first:end] = values.reshape(len(rows), -1)
        return found

    def _give(self, arrays: Sequence[Array]) -> None:
        self._group.give(_bytes(*arrays), [0])

    def _ask(self, question: Question, *arrays: Sequence[Array]) -> None:
        """Ask all other ranks. `arrays`: for all of them, or for each."""
        for number, other in enumerate(self._others):
            given = arrays[min(number, len(arrays) - 1)] if arrays else ()
            head = np.zeros(_HEAD, dtype=np.int64)
            head[: 1 + len(given)] = _QUESTIONS.index(question), *map(len, given)
            self._group.give(head.view(np.uint8), [other])
            if len(given):
                self._group.give(_bytes(*given), [other])

    def _read_question(self) -> tuple[Question, list[Array]]:
        number, *lengths = self._taken([(np.int64, _HEAD)], 0)[0].tolist()
        question = _QUESTIONS[number]
        types = _ARRAYS[question]
        return question, self._taken(list(zip(types, lengths, strict=False)), 0) if types else []

    def _take(self, forms: Sequence[Sequence[tuple[Any, int]]]) -> list[list[Array]]:
        """Take arrays of some types and lengths from each other rank."""
        return [self._taken(form, other) for other, form in zip(self._others, forms, strict=True)]

    def _taken(self, form: Sequence[tuple[Any, int]], sender: int) -> list[Array]:
        sizes = [np.dtype(dtype).itemsize * count for dtype, count in form]
        data = np.empty(sum(sizes), dtype=np.uint8)
        self._group.take({sender: data})
        self.num_bytes += len(data)
        ends = np.cumsum(sizes)
        return [
            np.require(data[end - size : end].view(dtype), requirements="A")
            for (dtype, _), size, end in zip(form, sizes, ends, strict=True)
        ]


def _bytes(*values: Any) -> Array:
    return np.concatenate([np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in values])


class AnsweringModel(WrappedModel):
    """A rank's part of a model, whose logits are those of its columns, for which rank 0 asks."""

    def __init__(self, model: StepModel, logits: DividedLogits) -> None:
        super().__init__(model)
        self._divided = logits

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        own = self._model.logits(hidden, adapters)
        self._divided.answer(own)
        return own


class AskingModel(WrappedModel):
    """Rank 0's part of a model."""

    def __init__(self, model: StepModel, logits: DividedLogits) -> None:
        super().__init__(model)
        self._divided = logits

    def logits(self, hidden: Array, adapters: Any = None) -> Array:
        return self._divided.whole(self._model.logits(hidden, adapters))

    def sample(self, hidden: Array, adapters: Any, batch: SamplingBatch) -> SampledTokens:
        return self._divided.sample(self._model.logits(hidden, adapters), batch)

    def report(self, hidden: Array, adapters: Any, token_ids: Rows, reports: Reports) -> Logprobs:
        return self._divided.report(self._model.logits(hidden, adapters), token_ids, reports)


class AskingRunner(EagerRunner):
    """An `EagerRunner` that gathers no logits to sample and to report."""

    model: AskingModel

    def _sampled(
        self, hidden: Array, adapters: Any, rows: Rows, num_generated: Rows, masks: TokenMasks | None
    ) -> Sampled:
        batch = self._sampling.batch(rows, num_generated)._replace(masks=masks)
        return by_row(self.model.sample(hidden, adapters, batch), batch.reports)

    def _sampled_runs(
        self,
        hidden: Array,
        adapters: Any,
        rows: Rows,
        num_generated: Rows,
        proposed: Sequence[Sequence[int]],
        masks: list[Mask | None],
    ) -> Sampled:
        counts = np.array([1 + len(tokens) for tokens in proposed], dtype=np.int64)
        if self._sampling.penalised[rows[counts > 1]].any():  # their tokens depend on each other
            return super()._sampled_runs(hidden, adapters, rows, num_generated, proposed, masks)
        every, numbers = np.repeat(rows, counts), ranges(num_generated, counts)
        return self._sampled(hidden, adapters, every, numbers, mask_rows(masks))

    def _reported(self, hidden: Array, adapters: Any, piece: PromptRows) -> Logprobs:
        return self.model.report(hidden, adapters, piece.token_ids, piece.reports)
