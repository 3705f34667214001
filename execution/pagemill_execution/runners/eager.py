"""Runs steps on the CPU: applies a plan's differences, runs one forward pass over the flattened batch, and samples.

It is synchronous: `launch` does the work and `wait` returns its result. `ThreadedRunner` makes it overlap; a GPU has
`runners.device.device_runner`. Scheduling is `scheduler`'s part, operations are `pagemill_kernels`', loading
`starting.load_cpu`'s. Arrays are numpy's; a `step_model.StepModel` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.step_model import CachedTokens, StepModel, StepTokens
from pagemill_execution.runners.base import Runner, RunnerInfo
from pagemill_execution.runners.drafter import Drafter
from pagemill_execution.runners.errors import StepSkippedError
from pagemill_execution.runners.inputs import RequestRows, StateRows, StepInputs
from pagemill_execution.runners.kv_cache import KindBlocks, KVCache
from pagemill_execution.runners.prompt_logprobs import PromptRows, by_request, piece_rows
from pagemill_execution.runners.results import result_of, result_of_runs
from pagemill_execution.runners.row_adapters import RowAdapters
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.runs import masks_of, runs_of, sample_runs
from pagemill_execution.sampling.sampler import Mask, Sampled, mask_rows, sample
from pagemill_execution.step import StepPlan, StepResult, TokenLogprobs
from pagemill_kernels.arrays import Array
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.sampling.batch import Logprobs, TokenMasks
from pagemill_kernels.sampling.host import host_sampler
from pagemill_protocol.report.cache_kinds import kinds_of_windows
from pagemill_servers.process.malloc import trim_heap


class EagerRunner:
    """One model, one KV cache, `max_num_seqs` rows."""

    def __init__(
        self,
        model: StepModel,
        kv_cache: KVCache,
        info: RunnerInfo,
        max_num_seqs: int,
        adapters: RowAdapters | None = None,
        draft: Sequence[tuple[StepModel, KVCache]] = (),
    ) -> None:
        """`draft`: a model that drafts tokens, or heads that do, each with its cache."""
        self.info = info
        self.model = model
        self.kv_cache = kv_cache
        padding_blocks = [own.padding_block for own in kv_cache.of_kinds]
        self._states = None
        if kv_cache.cache_kinds[-1].state:
            self._states = StateRows(max_num_seqs, info.block_size, padding_blocks.pop())
        self._rows = RequestRows(max_num_seqs, info.max_model_len, info.block_size, padding_blocks)
        self._kind_of = kinds_of_windows(kv_cache.cache_kinds, model.spec.decoder.windows())
        self._sampling = SamplingRows(max_num_seqs, info.vocab_size)
        self._adapters = adapters
        self._piece_rows = piece_rows(max_num_seqs)
        model.use_caches(kv_cache.layers)
        num_blocks = kv_cache.of_kinds[0].num_blocks
        self._drafter = Drafter(draft, num_blocks, self._rows, self._sampling) if draft else None

    def launch(self, plan: StepPlan) -> StepResult:
        self._apply_differences(plan)
        if not plan.num_scheduled_tokens:
            return StepResult()
        inputs = self._rows.gather(plan)
        hidden = self.model.hidden(self._tokens(inputs), self._adapters_of(inputs))
        result = self._answer(plan, inputs, hidden)
        if self._drafter is not None:
            result.drafted, result.draft_ms = self._drafter.run(inputs, plan.drafts, hidden)
        return result

    def wait(self, handle: Any) -> StepResult:
        result: StepResult = handle
        return result

    def sleep(self) -> int:
        self.close()
        trim_heap()
        return self.kv_cache.num_bytes + (0 if self._drafter is None else self._drafter.num_bytes)

    def wake(self) -> None:
        self.kv_cache.allocate()
        self.model.use_caches(self.kv_cache.layers)
        if self._drafter is not None:
            self._drafter.wake()

    def close(self) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self.model.use_caches(())
        self.kv_cache.release()

    def _apply_differences(self, plan: StepPlan) -> None:
        for row in self._rows.release(plan.released):
            self._sampling.release(row)
            if self._adapters is not None:
                self._adapters.release((row,))
        for admitted in plan.admitted:
            is_new = admitted.request_id not in self._rows
            row = self._rows.admit(admitted)
            if self._drafter is not None and is_new:
                self._drafter.begin(row, admitted.num_computed_tokens)
            if self._states is not None:
                self._states.admit(row, admitted, is_new=is_new)
            self._sampling.admit(row, admitted)
            if self._adapters is not None:
                self._adapters.admit(row, admitted.adapter_digest)
        self._rows.update_blocks(plan)
        if self._states is not None:
            for changes in plan.tables[len(self._rows.block_tables) :]:
                for request_id, index, slot in changes.placed:
                    self._states.change(self._rows.row(request_id), index, slot)
        of_drafts = (
            []
            if self._drafter is None
            else [(own, changes) for changes in plan.tables[:1] for own in self._drafter.blocks]
        )
        copied = [
            (own, changes.copies, own.contents([source for source, _ in changes.copies]))
            for own, changes in (*zip(self.kv_cache.of_kinds, plan.tables, strict=False), *of_drafts)
            if changes.copies
        ]  # all that is copied is read before any of it is written: kinds may share memory
        for own, copies, contents in copied:
            own.fill([copy for _, copy in copies], contents)

    def _adapters_of(self, inputs: StepInputs, tokens: NDArray[np.int64] | slice | None = None) -> Any:
        """Return the adapters of the step's tokens, or of some of them; None: none has one."""
        if self._adapters is None:
            return None
        rows = np.repeat(inputs.rows, np.diff(inputs.query_start_loc))
        return self._adapters.of(rows if tokens is None else rows[tokens])

    def _answer(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        """Return the step's result from the hidden states of its tokens."""
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden) if plan.prompt_targets else {}
        result = self._sample(plan, inputs, self._sampled_rows(inputs, hidden))
        result.prompt_logprobs = prompt_logprobs
        return result

    def _sampled_rows(self, inputs: StepInputs, hidden: Array) -> Array:
        """Return the normalised hidden states of the tokens behind which requests sample, [sampled tokens, hidden]."""
        sampled = inputs.sampled_tokens
        return hidden if len(sampled) == len(hidden) else hidden[sampled]

    def _tokens(self, inputs: StepInputs) -> StepTokens:
        of_kinds = [
            CachedTokens(slots, self._batch(inputs, own, table))
            for own, slots, table in zip(self.kv_cache.of_kinds, inputs.slots, inputs.block_tables, strict=False)
        ]
        caches = {window: of_kinds[number] for window, number in self._kind_of.items()}
        states = None
        if self._states is not None:
            computed = self._rows.num_computed_tokens
            states = self._states.gather(inputs.rows, inputs.query_start_loc, computed, inputs.proposed)
        return StepTokens(inputs.token_ids, inputs.positions, caches, states=states)

    def _batch(self, inputs: StepInputs, own: KindBlocks, block_table: NDArray[np.int32]) -> AttentionBatch:
        return AttentionBatch(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=block_table,
            block_size=self.info.block_size,
            padding_block=own.padding_block,
        )

    def _prompt_logprobs(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> dict[str, list[TokenLogprobs]]:
        starts = dict(zip(inputs.request_ids, inputs.query_start_loc.tolist(), strict=False))
        pieces = list(PromptRows.of(plan.prompt_targets, starts).pieces(self._piece_rows))
        found = [self._reported(hidden[piece.rows], self._adapters_of(inputs, piece.rows), piece) for piece in pieces]
        return by_request(plan.prompt_targets, pieces, found)

    def _reported(self, hidden: Array, adapters: Any, piece: PromptRows) -> Logprobs:
        return host_sampler().report(self.model.logits(hidden, adapters), piece.token_ids, piece.reports)

    def _sample(self, plan: StepPlan, inputs: StepInputs, hidden: Array) -> StepResult:
        if len(inputs.sampling) == 0:
            self._rows.advance(inputs, np.zeros(0, dtype=np.int64))
            return StepResult()
        rows = inputs.rows[inputs.sampling]
        request_ids = [inputs.request_ids[i] for i in inputs.sampling.tolist()]
        num_generated = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        adapters = self._adapters_of(inputs, inputs.sampled_tokens)
        if not plan.proposals:
            masks = mask_rows(masks_of(plan, request_ids)) if plan.token_masks else None
            sampled = self._sampled(hidden, adapters, rows, num_generated, masks)
            self._rows.advance(inputs, sampled.token_ids)
            return self._scrubbed(result_of(request_ids, sampled))
        proposed = [plan.proposals.get(name, []) for name in request_ids]
        masks_of_runs = masks_of(plan, request_ids)
        sampled = self._sampled_runs(hidden, adapters, rows, num_generated, proposed, masks_of_runs)
        runs = runs_of(sampled, proposed)
        num_accepted = np.array([len(run) - 1 for run in runs], dtype=np.int64)
        self._rows.advance(inputs, sampled.token_ids[[run[-1] for run in runs]], num_accepted)
        return self._scrubbed(result_of_runs(request_ids, sampled, runs))

    def _sampled(
        self,
        hidden: Array,
        adapters: Any,
        rows: NDArray[np.int64],
        num_generated: NDArray[np.int64],
        masks: TokenMasks | None,
    ) -> Sampled:
        return sample(self.model.logits(hidden, adapters), self._sampling, rows, num_generated, masks)

    def _sampled_runs(
        self,
        hidden: Array,
        adapters: Any,
        rows: NDArray[np.int64],
        num_generated: NDArray[np.int64],
        proposed: Sequence[Sequence[int]],
        masks: list[Mask | None],
    ) -> Sampled:
        logits = self.model.logits(hidden, adapters)
        return sample_runs(logits, self._sampling, rows, num_generated, proposed, masks)

    def _scrubbed(self, result: StepResult) -> StepResult:
        self._scrub(result.failed)
        return result

    def _scrub(self, failed: Iterable[str]) -> None:
        """Overwrite the keys and values of requests that failed: kernels multiply them by zero."""
        for name in failed:
            for own, block_ids in zip(self.kv_cache.of_kinds, self._rows.blocks(self._rows.row(name)), strict=False):
                own.scrub(block_ids)


class ThreadedRunner:
    def __init__(self, inner: Runner, prepare_thread: Callable[[], object] | None = None) -> None:
        """Start the thread. `prepare_thread` is called on it before its first step: torch has per-thread settings."""
        self.info = inner.info._replace(overlaps=True)
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner", initializer=prepare_thread)
        self._unread: Future[StepResult] | None = None

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        self._unread = self._thread.submit(self._run, plan, self._unread)
        return self._unread

    def wait(self, handle: Any) -> StepResult:
        future: Future[StepResult] = handle
        try:
            return future.result()
        finally:
            if self._unread is future:
                self._unread = None

    def sleep(self) -> int:
        return self._thread.submit(self._inner.sleep).result()

    def wake(self) -> None:
        self._thread.submit(self._inner.wake).result()

    def close(self) -> None:
        """Wait for the running step and close the inner runner."""
        self._thread.shutdown(cancel_futures=True)
        self._inner.close()

    def _run(self, plan: StepPlan, before: Future[StepResult] | None) -> StepResult:
        if before is not None and before.exception() is not None:
            raise StepSkippedError(f"step {plan.step} was not run: the one before it failed")
        return self._inner.wait(self._inner.launch(plan))
