"""Runs a draft model, or a head that reads hidden states, behind the model that verifies: computes the same tokens,
then drafts some that may follow.

Its cache has a block for each block of the kind that keeps everything, under the same number, and has computed a block
when the model has: prefix hits, forks, preemptions and copies hold for it without further rules. Decodes for which
nothing is drafted may lag within a block: a run for 16 tokens costs little more than one for a single token. Drafted
tokens have no blocks of their sequence yet. They are written behind its tokens, where no other sequence reads, or into
blocks of the row that nothing else uses, and computed again by the step that verifies them. `eager` calls it.

A head (`decoders.head_states`) computes pairs: the token at a place, and the target's hidden state of the one before,
which is kept in the place of that one. The first token has no pair, and nothing reads its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.step_model import CachedTokens, StepModel, StepTokens
from pagemill_execution.runners.inputs import RequestRows, StepInputs
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.runs import ranges
from pagemill_kernels.arrays import Array
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.sampling.host import host_sampler

Ints = NDArray[np.int64]


class Drafted(NamedTuple):
    token_ids: dict[str, list[int]]
    """What may follow the tokens of each request, in order."""
    ms: float
    """Milliseconds that drafting took, parts of prompts excepted."""


class Drafter:
    def __init__(
        self, model: StepModel, kv_cache: KVCache, num_blocks: int, rows: RequestRows, sampling: SamplingRows
    ) -> None:
        """`model`: a draft model, or a head that reads hidden states. `kv_cache`: has `num_blocks` blocks for those of
        the first kind, and the same number for each row behind them. `rows`, `sampling`: of the runner, after a step
        was counted."""
        self.kv_cache = kv_cache
        self._model = model
        self._head = model if isinstance(model, HeadStates) else None
        self._first = 0 if self._head is None else 1
        """The first token that is computed: a head computes pairs with the token before."""
        self._rows = rows
        self._sampling = sampling
        self._num_blocks = num_blocks
        max_rows, width = rows.token_ids.shape
        self._max_model_len = width - 1
        self._padding_block = kv_cache.of_kinds[0].padding_block
        self._num_computed = np.zeros(max_rows, dtype=np.int64)
        """Tokens of each row that this model has computed."""
        self._own_blocks = (kv_cache.of_kinds[0].num_blocks - num_blocks) // max_rows
        self._windows = model.spec.decoder.windows()
        self._num_embedded = model.spec.decoder.embedding.num_rows
        model.use_caches(kv_cache.layers)

    def wake(self) -> None:
        self.kv_cache.allocate()
        self._model.use_caches(self.kv_cache.layers)

    def close(self) -> None:
        self._model.use_caches(())
        self.kv_cache.release()

    def begin(self, row: int, num_computed_tokens: int) -> None:
        """Note that a request got a row, and what its blocks contain."""
        self._num_computed[row] = num_computed_tokens

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self.kv_cache.of_kinds[0].copy_blocks(copies)

    def scrub(self, block_ids: Ints) -> None:
        self.kv_cache.of_kinds[0].scrub(block_ids)

    def run(self, inputs: StepInputs, drafts: Mapping[str, int], last: Array) -> Drafted:
        """Compute the tokens of a step that was counted, and draft up to `drafts[request]` tokens for some of its
        requests, which have sampled. `last`: what the model that verifies has computed, normalised."""
        if self._head is not None:
            self._head.keep_states(inputs.slots[0], last)
        rows, size, began_s = inputs.rows, self._rows.block_size, time.perf_counter()
        starts, ends = np.maximum(self._num_computed[rows], self._first), self._rows.num_computed_tokens[rows]
        room = self._max_model_len - self._rows.num_tokens[rows]
        wanted = np.minimum(np.array([drafts.get(name, 0) for name in inputs.request_ids], dtype=np.int64), room)
        wanted = np.maximum(wanted, 0)
        is_due = (wanted > 0) | (np.diff(inputs.query_start_loc) > 1) | (ends // size > starts // size)
        counts = np.where(is_due, ends - starts + (wanted > 0), 0)
        if not counts.any():
            return Drafted({}, 0.0)
        self._num_computed[rows[is_due]] = ends[is_due]
        order = np.lexsort((starts, counts > 1))
        order = order[counts[order] > 0]
        hidden = self._hidden(rows[order], starts[order], counts[order], None)
        active = order[wanted[order] > 0]
        if not len(active):
            return Drafted({}, 0.0)
        hidden = hidden[np.cumsum(counts[order])[wanted[order] > 0] - 1]
        found: dict[str, list[int]] = {inputs.request_ids[index]: [] for index in active.tolist()}
        first_s, place = began_s, 0
        while True:
            token_ids, finite = self._draw(hidden, rows[active], place)
            if not place:
                first_s = time.perf_counter()
            active, token_ids = active[finite], token_ids[finite]
            for index, token_id in zip(active.tolist(), token_ids.tolist(), strict=True):
                found[inputs.request_ids[index]].append(token_id)
            place += 1
            goes_on = wanted[active] > place
            active, token_ids, hidden = active[goes_on], token_ids[goes_on], hidden[finite][goes_on]
            if not len(active):
                took_s = time.perf_counter() - began_s
                if place > 1 and counts.max() > 2 * size:  # with parts of prompts, which are no part of drafting
                    took_s = (took_s + began_s - first_s) * place / (place - 1)
                return Drafted(found, took_s * 1000)
            positions = self._rows.num_tokens[rows[active]] + place - 1
            self._rows.token_ids[rows[active], positions] = token_ids
            hidden = self._hidden(rows[active], positions, np.ones(len(active), dtype=np.int64), hidden)

    def _draw(self, hidden: Array, rows: Ints, place: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Draw a token for each row with the key with which the token at this place will be drawn."""
        generated = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows] + place
        logits = self._as_wide(self._model.logits(hidden))
        sampled = host_sampler().sample_tokens(logits, self._sampling.batch_of_drafts(rows, generated))
        for row in rows[~sampled.finite].tolist():
            self.scrub(self._table(np.array([row]), int(self._rows.num_blocks[0][row]))[0].astype(np.int64))
        return sampled.token_ids, sampled.finite

    def _as_wide(self, logits: Array) -> Array:
        """Return logits of the vocabulary of the model that verifies: files pad equal vocabularies differently."""
        missing = self._sampling.vocab_size - logits.shape[1]
        if missing > 0:
            return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return np.ascontiguousarray(logits[:, : self._sampling.vocab_size])

    def _hidden(self, rows: Ints, starts: Ints, counts: Ints, before: Array | None) -> Array:
        """Compute `counts` tokens of each row from `starts` on. Rows with one token come first. `before`: what a head
        has computed of the tokens before them; None: the model that verifies has."""
        size, seq_lens = self._rows.block_size, starts + counts
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        table = self._table(rows, -(-int(seq_lens.max()) // size))
        token_rows, positions = np.repeat(np.arange(len(rows)), counts), ranges(starts, counts)
        indices, offsets = np.divmod(positions, size)
        slots = table[token_rows, indices].astype(np.int64) * size + offsets
        batch = AttentionBatch(query_start_loc, seq_lens, table, size, self._padding_block, first_key=self._first)
        cached = CachedTokens(slots, batch)
        token_ids = self._rows.token_ids[rows[token_rows], positions].astype(np.int64)
        token_ids = np.clip(token_ids, 0, self._num_embedded - 1)
        if self._head is None:
            before = None
        elif before is None:
            indices, offsets = np.divmod(positions - 1, size)
            before = self._head.states_of(table[token_rows, indices].astype(np.int64) * size + offsets)
        return self._model.hidden(StepTokens(token_ids, positions, dict.fromkeys(self._windows, cached), before))

    def _table(self, rows: Ints, width: int) -> NDArray[np.int32]:
        """Return the blocks of the rows: those of their sequences, and behind them the row's own."""
        beyond = np.arange(width) - self._rows.num_blocks[0][rows][:, None]
        own = self._num_blocks + rows[:, None] * self._own_blocks + np.clip(beyond, 0, self._own_blocks - 1)
        return np.where(beyond < 0, self._rows.block_tables[0][rows, :width], own).astype(np.int32)
