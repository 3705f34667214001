"""Runs a draft model, or a head that reads hidden states, behind the model that verifies: computes the same tokens,
then drafts some that may follow.

Its cache has a block for each block of the kind that keeps everything, under the same number, and has computed a block
when the model has: prefix hits, forks, preemptions and copies hold for it without further rules. Decodes for which
nothing is drafted may lag within a block: a run for 16 tokens costs little more than one for a single token. Drafted
tokens have no blocks of their sequence yet. They are written behind its tokens, where no other sequence reads, or into
blocks of the row that nothing else uses, and computed again by the step that verifies them. `eager` calls it.

A head (`decoders.head_states`) computes pairs: the token at a place, and the target's hidden state of the one before,
which is kept in the place of that one. The first token has no pair, and nothing reads its place. Of several heads
(layers for multi-token prediction) each reads what the one before it has computed, and drafts one token further; the
last one drafts all that follow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.step_model import CachedTokens, StepModel, StepTokens
from pagemill_execution.runners.inputs import RequestRows, StepInputs
from pagemill_execution.runners.kv_cache import KindBlocks, KVCache
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


class _Head(NamedTuple):
    """A model that drafts, or one of several heads."""

    model: StepModel
    states: HeadStates | None
    kv_cache: KVCache
    first: int
    """The first token that is computed: heads compute pairs with the tokens before."""


class Drafter:
    def __init__(
        self, models: Sequence[tuple[StepModel, KVCache]], num_blocks: int, rows: RequestRows, sampling: SamplingRows
    ) -> None:
        """`models`: a draft model, or heads that read hidden states, with their caches. These have `num_blocks` blocks
        for those of the first kind, and the same number for each row behind them. `rows`, `sampling`: of the runner,
        after a step was counted."""
        self._heads = [
            _Head(model, model, cache, 1 + place) if isinstance(model, HeadStates) else _Head(model, None, cache, 0)
            for place, (model, cache) in enumerate(models)
        ]
        self._rows = rows
        self._sampling = sampling
        self._num_blocks = num_blocks
        max_rows, width = rows.token_ids.shape
        self._max_model_len = width - 1
        (model, cache), *_ = models
        self._padding_block = cache.of_kinds[0].padding_block
        self._num_computed = np.zeros(max_rows, dtype=np.int64)
        """Tokens of each row that these models have computed."""
        self._own_blocks = (cache.of_kinds[0].num_blocks - num_blocks) // max_rows
        self._num_embedded = model.spec.decoder.embedding.num_rows
        for each in self._heads:
            each.model.use_caches(each.kv_cache.layers)

    @property
    def num_bytes(self) -> int:
        return sum(each.kv_cache.num_bytes for each in self._heads)

    def wake(self) -> None:
        for each in self._heads:
            each.kv_cache.allocate()
            each.model.use_caches(each.kv_cache.layers)

    def close(self) -> None:
        for each in self._heads:
            each.model.use_caches(())
            each.kv_cache.release()

    def begin(self, row: int, num_computed_tokens: int) -> None:
        """Note that a request got a row, and what its blocks contain."""
        self._num_computed[row] = num_computed_tokens

    @property
    def blocks(self) -> list[KindBlocks]:
        """The blocks of each cache, which move with those of the first kind."""
        return [each.kv_cache.of_kinds[0] for each in self._heads]

    def scrub(self, block_ids: Ints) -> None:
        for each in self.blocks:
            each.scrub(block_ids)

    def run(self, inputs: StepInputs, drafts: Mapping[str, int], last: Array) -> Drafted:
        """Compute the tokens of a step that was counted, and draft up to `drafts[request]` tokens for some of its
        requests, which have sampled. `last`: what the model that verifies has computed, normalised."""
        first = self._heads[0]
        if first.states is not None:
            first.states.keep_states(inputs.slots[0], last)
        rows, size, began_s = inputs.rows, self._rows.block_size, time.perf_counter()
        starts, ends = np.maximum(self._num_computed[rows], first.first), self._rows.num_computed_tokens[rows]
        room = self._max_model_len - self._rows.num_tokens[rows]
        wanted = np.minimum(np.array([drafts.get(name, 0) for name in inputs.request_ids], dtype=np.int64), room)
        wanted = np.maximum(wanted, 0)
        is_due = (wanted > 0) | (np.diff(inputs.query_start_loc) > 1) | (ends // size > starts // size)
        due = np.flatnonzero(is_due)
        self._num_computed[rows[due]] = ends[due]
        found: dict[str, list[int]] = {}
        hidden, active, place, first_s = last, due[wanted[due] > 0], 0, began_s
        longest = int((ends - starts)[due].max(initial=0))
        while len(active) or place < len(self._heads):
            if place < len(self._heads):
                hidden = self._computed(place, rows, starts, ends, due, np.isin(due, active))
            else:
                positions = self._rows.num_tokens[rows[active]] + place - 1
                one = np.ones(len(active), dtype=np.int64)
                hidden = self._hidden(self._heads[-1], rows[active], positions, one, hidden)
            if len(active):
                token_ids, finite = self._draw(hidden, rows[active], place)
                active, token_ids, hidden = active[finite], token_ids[finite], hidden[finite]
                for index, token_id in zip(active.tolist(), token_ids.tolist(), strict=True):
                    found.setdefault(inputs.request_ids[index], []).append(token_id)
                goes_on = wanted[active] > place + 1
                active, token_ids, hidden = active[goes_on], token_ids[goes_on], hidden[goes_on]
                self._rows.token_ids[rows[active], self._rows.num_tokens[rows[active]] + place] = token_ids
            first_s = first_s if place else time.perf_counter()
            place += 1
        if not found:
            return Drafted({}, 0.0)
        took_s = time.perf_counter() - began_s
        if place > 1 and longest > 2 * size:  # with parts of prompts, which are no part of drafting
            took_s = (took_s + began_s - first_s) * place / (place - 1)
        return Drafted(found, took_s * 1000)

    def _computed(
        self, place: int, rows: Ints, starts: Ints, ends: Ints, due: Ints, is_active: NDArray[np.bool_]
    ) -> Array:
        """Let a head compute the step's tokens, and those that were drafted so far for the rows that go on. Returns
        what it has computed of the last token of each of these."""
        head = self._heads[place]
        begins = np.maximum(starts[due], head.first)
        counts = np.maximum(ends[due] + np.where(is_active, 1 + place, 0) - begins, 0)
        order = np.lexsort((begins, counts > 1))
        order = order[counts[order] > 0]
        if not len(order):
            return np.zeros((0, 0), dtype=np.float32)
        of_order = rows[due][order], begins[order], counts[order]
        if head.first:
            self._clear_first(head, of_order[0][of_order[1] == head.first])
        hidden = self._hidden(head, *of_order, None)
        if place + 1 < len(self._heads):
            states = self._heads[place + 1].states
            assert states is not None
            states.keep(self._slots(*of_order, 0), hidden)
        found = np.zeros(len(due), dtype=np.int64)
        found[order] = np.cumsum(counts[order]) - 1
        return hidden[found[is_active]]

    def _clear_first(self, head: _Head, rows: Ints) -> None:
        """Clear the places before a head's first pair: kernels multiply what is there by zero, and memory that was
        another kind's has any values."""
        if len(rows):
            first = np.arange(head.first)
            blocks = self._table(rows, 1 + first[-1] // self._rows.block_size)[:, first // self._rows.block_size]
            for cache in head.kv_cache.layers[:-1]:
                assert isinstance(cache, np.ndarray)
                cache[blocks, :, first % self._rows.block_size] = 0

    def _draw(self, hidden: Array, rows: Ints, place: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Draw a token for each row with the key with which the token at this place will be drawn."""
        generated = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows] + place
        logits = self._as_wide(self._heads[min(place, len(self._heads) - 1)].model.logits(hidden))
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

    def _hidden(self, head: _Head, rows: Ints, starts: Ints, counts: Ints, before: Array | None) -> Array:
        """Compute `counts` tokens of each row from `starts` on. Rows with one token come first. `before`: what a head
        has computed of the tokens before them; None: what was kept of them is read."""
        size, seq_lens = self._rows.block_size, starts + counts
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        table = self._table(rows, -(-int(seq_lens.max()) // size))
        token_rows, positions = np.repeat(np.arange(len(rows)), counts), ranges(starts, counts)
        batch = AttentionBatch(query_start_loc, seq_lens, table, size, self._padding_block, first_key=head.first)
        cached = CachedTokens(self._slots(rows, starts, counts, 0), batch)
        token_ids = self._rows.token_ids[rows[token_rows], positions].astype(np.int64)
        token_ids = np.clip(token_ids, 0, self._num_embedded - 1)
        if head.states is None:
            before = None
        elif before is None:
            before = head.states.states_of(self._slots(rows, starts, counts, 1))
        windows = head.model.spec.decoder.windows()
        return head.model.hidden(StepTokens(token_ids, positions, dict.fromkeys(windows, cached), before))

    def _slots(self, rows: Ints, starts: Ints, counts: Ints, back: int) -> Ints:
        """Return the slots of so many tokens of each row, or of those `back` before them."""
        size = self._rows.block_size
        table = self._table(rows, -(-int((starts + counts).max()) // size))
        indices, offsets = np.divmod(ranges(starts, counts) - back, size)
        slots: Ints = table[np.repeat(np.arange(len(rows)), counts), indices].astype(np.int64) * size + offsets
        return slots

    def _table(self, rows: Ints, width: int) -> NDArray[np.int32]:
        """Return the blocks of the rows: those of their sequences, and behind them the row's own."""
        beyond = np.arange(width) - self._rows.num_blocks[0][rows][:, None]
        own = self._num_blocks + rows[:, None] * self._own_blocks + np.clip(beyond, 0, self._own_blocks - 1)
        return np.where(beyond < 0, self._rows.block_tables[0][rows, :width], own).astype(np.int32)
