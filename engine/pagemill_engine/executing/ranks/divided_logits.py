"""Logits that ranks of several nodes divide: rank 0 samples without gathering them, where a part of each says enough.

The other ranks of its stage, whose heads have other columns, send their best tokens, and then answer what rank 0 asks
for until it asks for nothing more: draws and candidates of some rows (`pagemill_kernels.sampling.parts`), and whole
rows of others: those with masks, biases, penalties or log probabilities, and those that candidates do not decide. Rank
0 alone knows which. On one node all write into one array (`ranks.shared_logits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill_engine.decoders.step_model import StepModel, WrappedModel
from pagemill_engine.executing.eager import EagerRunner
from pagemill_engine.sampling.sampler import Sampled, by_row
from pagemill_kernels.arrays import Array
from pagemill_kernels.sampling.batch import Draws, SampledTokens, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.filters import DRAWS, is_drawn
from pagemill_kernels.sampling.host import host_sampler
from pagemill_kernels.sampling.parts import BestTokens, PartOfRows, best_of_all, best_tokens, decide, part_of_rows
from pagemill_models.sharding.slices import dealt

Rows = NDArray[np.int64]
_NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


class LogitsGroup(Protocol):
    """What exchanges parts of logits among the ranks of the last stage, of which rank 0 is the first."""

    rank: int
    members: int

    def give(self, values: Array, to: Sequence[int]) -> None: ...

    def take(self, into: Mapping[int, Array]) -> None:
        """Fill arrays from other ranks. Raises `GroupAborted`."""
        ...


class _Question(NamedTuple):
    """What rank 0 asks for; nothing: it has sampled."""

    drawn: Rows = _NO_ROWS
    draws: Draws | None = None
    best: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
    """[drawn]: the largest logit of all."""
    whole: Rows = _NO_ROWS


class DividedLogits:
    def __init__(self, group: LogitsGroup, vocab_size: int) -> None:
        self._group, self._vocab_size = group, vocab_size
        self._columns = dealt(vocab_size, group.members)
        self._sizes = [end - first for first, end in self._columns]
        self._others = list(range(1, group.members))
        self.num_bytes = 0
        """Bytes that rank 0 has taken."""

    def answer(self, own: Array) -> None:
        """Let rank 0 sample. own: [rows, columns of this rank]."""
        first = self._columns[self._group.rank][0]
        best = best_tokens(own, first)
        self._group.give(_bytes(best.values, best.token_ids), [0])
        while True:
            question = self._read_question()
            if question is None:
                return
            if question.draws is not None:
                part = part_of_rows(own[question.drawn], first, self._vocab_size, question.draws, question.best)
                self._group.give(_bytes(part.sums, part.token_ids, part.masses, part.counts), [0])
                self._group.give(_bytes(part.candidates), [0])
            if len(question.whole):
                self._group.give(_bytes(own[question.whole]), [0])

    def whole(self, own: Array) -> Array:
        """Return all columns of rank 0's rows."""
        self._best(own)
        found = self._whole(own, np.arange(len(own)))
        self._ask(_Question())
        return found

    def sample(self, own: Array, batch: SamplingBatch) -> SampledTokens:
        """Sample a token for each of rank 0's rows, the same as from all of their logits."""
        best = self._best(own)
        finite = np.isfinite(best.values)
        token_ids = best.token_ids.copy()
        changed = _changed_rows(batch)
        drawn = _NO_ROWS
        if batch.draws is not None:
            may_draw = is_drawn(batch.draws.settings) & finite
            may_draw[changed] = False
            drawn = np.flatnonzero(may_draw)
        if len(drawn):
            assert batch.draws is not None
            token_ids[drawn] = self._draw(own, drawn, batch.draws.at(drawn), best.values[drawn])
        whole = np.union1d(changed, drawn[token_ids[drawn] < 0])
        logprobs = None
        if len(whole):
            found = host_sampler().sample_tokens(self._whole(own, whole), batch.at(whole))
            token_ids[whole], finite[whole], logprobs = found
        self._ask(_Question())
        return SampledTokens(token_ids, finite, logprobs)

    def _best(self, own: Array) -> BestTokens:
        taken = self._take([[(np.float32, len(own)), (np.int64, len(own))]] * len(self._others))
        return best_of_all([best_tokens(own, 0), *(BestTokens(*each) for each in taken)])

    def _draw(self, own: Array, drawn: Rows, draws: Draws, best: NDArray[np.float32]) -> Rows:
        self._ask(_Question(drawn, draws, best))
        mine = part_of_rows(own[drawn], 0, self._vocab_size, draws, best)
        form: list[tuple[Any, int]] = [(np.float32, len(drawn)), *[(np.int64, len(drawn))] * 3]
        taken = self._take([form] * len(self._others))
        candidates = self._take([[(np.uint64, int(each[3].sum()))] for each in taken])
        others = [PartOfRows(*each, *keys) for each, keys in zip(taken, candidates, strict=True)]
        return decide([mine, *others], self._sizes, draws)

    def _whole(self, own: Array, rows: Rows) -> Array:
        self._ask(_Question(whole=rows))
        found = np.empty((len(rows), self._vocab_size), dtype=np.float32)
        found[:, : self._sizes[0]] = own[rows]
        taken = self._take([[(np.float32, len(rows) * size)] for size in self._sizes[1:]])
        for (values,), (first, end) in zip(taken, self._columns[1:], strict=True):
            found[:, first:end] = values.reshape(len(rows), -1)
        return found

    def _ask(self, question: _Question) -> None:
        self._group.give(_bytes(np.array([len(question.drawn), len(question.whole)], dtype=np.int64)), self._others)
        if question.draws is not None:
            self._group.give(
                _bytes(question.drawn, question.draws.settings, question.draws.keys, question.best), self._others
            )
        if len(question.whole):
            self._group.give(_bytes(question.whole), self._others)

    def _read_question(self) -> _Question | None:
        num_drawn, num_whole = self._taken([(np.int64, 2)], 0)[0].tolist()
        if not num_drawn and not num_whole:
            return None
        question = _Question()
        if num_drawn:
            form = [(np.int64, num_drawn), (DRAWS.dtype, num_drawn), (np.uint64, num_drawn), (np.float32, num_drawn)]
            drawn, settings, keys, best = self._taken(form, 0)
            question = _Question(drawn, Draws(settings, keys), best)
        if num_whole:
            question = question._replace(whole=self._taken([(np.int64, num_whole)], 0)[0])
        return question

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


def _changed_rows(batch: SamplingBatch) -> Rows:
    """Return the rows for which logits are changed or reported."""
    parts = (batch.masks, batch.edits, batch.penalties, batch.reports)
    return np.unique(np.concatenate([_NO_ROWS, *(each.rows for each in parts if each is not None)]))


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


class AskingRunner(EagerRunner):
    """An `EagerRunner` that gathers no logits to sample one token of each request."""

    model: AskingModel

    def _sampled(
        self, hidden: Array, adapters: Any, rows: Rows, num_generated: Rows, masks: TokenMasks | None
    ) -> Sampled:
        batch = self._sampling.batch(rows, num_generated)._replace(masks=masks)
        return by_row(self.model.sample(hidden, adapters, batch), batch.reports)
