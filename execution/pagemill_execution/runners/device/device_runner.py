"""Runs steps on a GPU without waiting for it between steps.

Requests' rows are on the device, a plan's differences are one copy and one launch, inputs are built there, and the
sampled token is the next step's input without being read by the host. `launch` queues a step, `wait` reads its tokens.
Steps run as CUDA graphs (`runners.device.graphs`) if one is large enough; others are launched kernel by kernel. With
Triton's interpreter the device is the CPU and a launch does the work. Operations are `pagemill_kernels`' part, loading
`starting.load_device`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_execution.decoders.on_torch.decoder import Decoder
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.filling import weight_bytes
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.device.device_adapters import DeviceAdapters
from pagemill_execution.runners.device.device_drafter import DeviceDraft, DeviceDrafter
from pagemill_execution.runners.device.device_forward import ALONE, DeviceForward, Neighbours
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.device.device_rows import DeviceRows, DeviceStep
from pagemill_execution.runners.device.graphs import CapturedGraph, GraphCapturer, GraphShape, StepGraphs
from pagemill_execution.runners.device.sleeping import SleepingModel
from pagemill_execution.runners.drafter import Drafted
from pagemill_execution.runners.errors import DeviceLostError, StepSkippedError
from pagemill_execution.runners.inputs import StateRows
from pagemill_execution.runners.prompt_logprobs import PromptRows, by_request, piece_rows
from pagemill_execution.runners.results import result_of, result_of_runs
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_execution.sampling.runs import masks_of, runs_of
from pagemill_execution.sampling.sampler import by_row, mask_rows
from pagemill_execution.step import AdmittedSequence, StepPlan, StepResult, TokenLogprobs
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.recurrent.batch import NO_STATES, StateBatch
from pagemill_kernels.registry import Ops
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout, RowState, StepRows
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.sampling.batch import NUM_SETTINGS, Reports, SampledTokens, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.device_sample import DeviceSample, Report, download_report, read_report
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_servers.process.cgroup import usable_cores


@dataclass(slots=True, eq=False)
class InFlight:
    """A step that was queued."""

    request_ids: list[str]
    """Ids of the requests that sample."""
    read: Callable[[], SampledTokens] | None = None
    """Waits for the sampled tokens; None if no request samples."""
    reports: Reports | None = None
    proposals: dict[str, list[int]] = field(default_factory=dict)
    """Proposed tokens by request."""
    read_prompts: Callable[[], dict[str, list[TokenLogprobs]]] | None = None
    """Waits for the log probabilities of prompt tokens; None if there are none."""
    read_drafts: Callable[[], Drafted] | None = None
    """Waits for what was drafted behind the step; None if nothing was computed for that."""
    error: Exception | None = None
    """Why the step could not be queued, or was skipped because of `earlier_failure`."""
    earlier_failure: InFlight | None = None
    """The earlier step that could not be queued."""


class DeviceRunner:
    """One model, one KV cache, `max_num_seqs` rows."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        kv_cache: DeviceKVCache,
        rotations: DeviceRotations,
        info: RunnerInfo,
        max_num_seqs: int,
        adapters: DeviceAdapters | None = None,
        *,
        neighbours: Neighbours = ALONE,
        draft: DeviceDraft | None = None,
    ) -> None:
        """`neighbours`: the ranks with which this one computes its part of a model. `draft`: what drafts tokens."""
        if ops.on_device is None:
            raise ValueError("the rows of requests need a backend that has operations for them")
        self.info = info._replace(overlaps=ops.device.type == "cuda", jumps_forward=ops.device.type != "cuda")
        self.model = model
        self.kv_cache = kv_cache
        self._ops, self._on_device = ops, ops.on_device
        self._max_num_seqs = max_num_seqs
        self._adapters = adapters
        self._drafter = None if draft is None else DeviceDrafter(draft, ops, ops.on_device, info)
        self._forward = DeviceForward(model, ops, ops.on_device, kv_cache, rotations, info.block_size, neighbours)
        self._sampling = self._sampling_rows(max_num_seqs)
        self._make_rows()
        if self._drafter is not None:
            self._forward.keep = self._drafter.forward.keep_states
        self._piece_rows = piece_rows(max_num_seqs)
        self._graphs: StepGraphs | None = None
        self._shapes: list[GraphShape] = []
        self._make_capturer: Callable[[], GraphCapturer] | None = None
        self._sleeping = [SleepingModel(model, kv_cache, ops.device)]
        if draft is not None:
            self._sleeping.append(SleepingModel(draft.model, draft.kv_cache, ops.device))
        self._uploaded: tuple[DeviceStep, GraphShape | None, DeviceStep, StepRows] | None = None
        """The latest step, the shape it was padded to, the padded step, and its rows on the device."""
        self._unread_failure: InFlight | None = None
        """The step that could not be queued, until it or a step behind it is waited for.

        Steps launched behind it do not run.
        """

    def launch(self, plan: StepPlan) -> InFlight:
        if self._unread_failure is not None:
            skipped = StepSkippedError(f"step {plan.step} was not run: the one before it failed")
            return InFlight([], error=skipped, earlier_failure=self._unread_failure)
        try:
            with torch.inference_mode():
                handle, step = self._queue(plan)
                self._end()
                if self._drafter is not None and step is not None:
                    handle.read_drafts = self._drafter.run(plan.drafts, step)
                return handle
        except Exception as error:
            self._unread_failure = InFlight([], error=self._explained(error))
            return self._unread_failure

    def wait(self, handle: InFlight) -> StepResult:
        if handle.error is not None:
            if self._unread_failure in (handle, handle.earlier_failure):
                self._unread_failure = None
            raise handle.error
        try:
            result = StepResult() if handle.read is None else _result(handle, handle.read())
            for name in handle.proposals.keys() & result.token_ids.keys():
                row, num_accepted = self._rows.row(name), len(result.token_ids[name]) - 1
                self._rows.accept(name, num_accepted)
                if self._drafter is not None and row is not None:
                    self._drafter.accept(row, num_accepted)
            if handle.read_drafts is not None:
                result.drafted, result.draft_ms = handle.read_drafts()
            if handle.read_prompts is not None:
                result.prompt_logprobs = handle.read_prompts()
        except Exception as error:
            raise self._explained(error) from error
        return result

    def compile(self, num_requests: int, num_tokens: int) -> None:
        """Compile, load and tune everything that a step of this size needs."""
        with self._forward.abbreviated():
            self.warm_up(num_requests, num_tokens)

    def warm_up(self, num_requests: int, num_tokens: int) -> None:
        """Run a step of padding requests with this many tokens. The padding block is zero again afterwards."""
        all_requests = np.arange(num_requests)
        step = self._padding_step(num_tokens, num_requests)
        step = step._replace(sample_start_loc=np.arange(num_requests + 1, dtype=np.int32), sampling=all_requests)
        staging = Staging()
        staging.put(self._rows.layout.record(self._rows.layout.padding_row), [0])
        with torch.inference_mode():
            at = self._upload(staging, step)
            inputs = self._inputs(step)
            self._build(at, step, inputs)
            logits = self._forward.logits(inputs, step.longest)
            if self._adapters is not None:
                slots = np.zeros(num_tokens, dtype=np.int32)  # of a slot that adds zeros, or is not used
                logits = self._forward.logits(inputs, step.longest, self._adapters.tables.rows(slots))
            if self._forward.has_head:
                drawn = self._drawn(logits, SamplingBatch(), inputs.settings, self._sampling, all_requests)
                self._on_device.advance_rows(self._state, at, drawn.tokens)
                drawn.tokens.cpu()
            if self._drafter is not None:
                self._drafter.warm_up(num_requests, num_tokens)
            self.kv_cache.zero_padding()

    def warm_up_sampling(self) -> None:
        """Sample one row that uses every sampling feature."""
        if not self._forward.has_head:
            return
        asks = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1)
        sampling = self._sampling_rows(1)
        sampling.admit(0, AdmittedSequence("", [0], 1, 0, [], asks, 0, 0))
        first = np.zeros(1, dtype=np.int64)
        masks = TokenMasks(first, np.full((1, -(-self.info.vocab_size // 32)), -1, dtype=np.int32))
        with torch.inference_mode():
            logits = self._forward.empty_logits(1).zero_()
            settings = torch.zeros(NUM_SETTINGS, dtype=torch.int32, device=self._ops.device)
            batch = sampling.batch_beside_draws(first, first)._replace(masks=masks)
            self._drawn(logits, batch, settings, sampling, first).tokens.cpu()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device, those of what drafts included."""
        return weight_bytes(self.model) + (0 if self._drafter is None else weight_bytes(self._drafter.draft.model))

    def graph_bytes(self, num_tokens: int, num_requests: int) -> int:
        """Return the bytes that captured steps of this size keep in addition to those of a step."""
        layout = self._rows.layout
        first, end = self._forward.columns
        of_requests = num_requests * 4 * (end - first + layout.num_kinds * layout.table_width)
        of_tokens = num_tokens * self.model.spec.hidden_size * self.model.dtype.itemsize
        return (of_requests + of_tokens) * (1 if self._drafter is None else 2)

    def resize_cache(self, info: RunnerInfo) -> None:
        """Replace the KV cache; its contents and the captured graphs are lost. `info`: the runner's new properties,
        with the cache's kinds and their blocks."""
        self._forget_graphs()
        self.kv_cache.resize(info.blocks_of_kinds, info.kinds, info.most_proposed)
        self.info = info
        if self._drafter is not None:
            self._drafter.draft.resize(info.num_blocks, self._max_num_seqs)
        self._make_rows()

    def capture_graphs(self, shapes: list[GraphShape], make_capturer: Callable[[], GraphCapturer]) -> None:
        """Record steps of `shapes`. Later steps are padded to the smallest shape that fits and replayed."""
        with torch.inference_mode():
            tables = None if self._adapters is None else self._adapters.tables
            self._graphs = StepGraphs(self._forward, shapes, self._rows.layout, self.info.max_model_len, tables)
        self._shapes, self._make_capturer = shapes, make_capturer
        self._record()

    def sleep(self) -> int:
        num_bytes = sum(each.sleep() for each in self._sleeping)
        if self._graphs is not None:
            self._forget_graphs()
            # Released again: memory of the captured graphs returns to the device only now.
            self.kv_cache.release()
        return num_bytes

    def wake(self) -> None:
        for each in self._sleeping:
            each.wake()
        self._record()

    def close(self) -> None:
        self._graphs = None
        self.kv_cache.layers.clear()
        if self._drafter is not None:
            self._drafter.forget_graphs()
            self._drafter.draft.kv_cache.layers.clear()

    def _forget_graphs(self) -> None:
        """Drop the graphs, because the buffers that they read will be replaced."""
        if self._graphs is not None:
            self._graphs.forget()
        if self._drafter is not None:
            self._drafter.forget_graphs()

    def _end(self) -> None:
        """Do what comes behind a queued step, and before what drafts behind it."""

    def _queue(self, plan: StepPlan) -> tuple[InFlight, DeviceStep | None]:
        """Queue a step; None: it has no tokens."""
        staging = Staging()
        known = {each.request_id for each in plan.admitted if self._rows.row(each.request_id) is not None}
        self._rows.apply(plan, self._sampling, staging)
        for each in plan.admitted:
            row, is_new = self._rows.row(each.request_id), each.request_id not in known - {*plan.released}
            if self._drafter is not None and row is not None:
                self._drafter.begin(row, each.num_computed_tokens, is_new=is_new)
        step = self._rows.step(plan)
        adapted = self._adapters is not None and bool((self._adapters.slots(step.rows) >= 0).any())
        graph = None if self._graphs is None else self._graphs.graph_for(step, adapted=adapted)
        padded, at = self._placed(staging, step, None if graph is None else graph.shape)
        self.kv_cache.copy_blocks([changes.copies for changes in plan.tables])
        if self._drafter is not None and plan.tables:
            self._drafter.draft.kv_cache.copy_blocks([plan.tables[0].copies])
        if not plan.num_scheduled_tokens:
            return InFlight([]), None
        inputs = self._inputs(step) if graph is None else graph.inputs
        self._build(at, padded, inputs, self._rows.states_of(step) or NO_STATES)
        adapters = self._adapters_of(padded, graph) if adapted else None
        if plan.prompt_targets:  # never in a decode
            hidden = self._hidden(step, inputs, graph, adapters)
            handle = self._report_and_sample(plan, at, step, inputs, hidden, adapters)
        else:
            handle = self._sample(plan, at, step, self._logits(step, inputs, graph, adapters), inputs.settings)
        return handle, step

    def _adapters_of(self, padded: DeviceStep, graph: CapturedGraph | None) -> TritonAdapterRows:
        """Return the adapters of the padded step's tokens, in the graph's buffer if there is one."""
        assert self._adapters is not None
        tables = self._adapters.tables
        rows = np.repeat(padded.rows, np.diff(padded.query_start_loc))
        slots = tables.upload(self._adapters.slots(rows))
        if graph is None or graph.slots is None:
            return tables.on_device(slots)
        graph.slots.copy_(slots)
        return tables.on_device(graph.slots)

    def _report_and_sample(
        self,
        plan: StepPlan,
        at: StepRows,
        step: DeviceStep,
        inputs: DeviceStepInputs,
        hidden: Tensor,
        adapters: TritonAdapterRows | None,
    ) -> InFlight:
        pieces = self._pieces(plan, step)
        downloads = [download_report(self._report(hidden, piece, adapters)) for piece in pieces]
        logits = self._forward.logits_of(hidden, inputs.last_tokens[: step.num_sampled], adapters)
        handle = self._sample(plan, at, step, logits, inputs.settings)
        handle.read_prompts = partial(self._read_prompts, plan, pieces, downloads, _mark(self._ops.device))
        return handle

    def _pieces(self, plan: StepPlan, step: DeviceStep) -> list[PromptRows]:
        """Return the prompt tokens that are reported on, in parts whose logits fit."""
        starts = dict(zip(step.request_ids, step.query_start_loc.tolist(), strict=False))
        return list(PromptRows.of(plan.prompt_targets, starts).pieces(self._piece_rows))

    def _read_prompts(
        self, plan: StepPlan, pieces: list[PromptRows], downloads: list[Report], done: torch.cuda.Event | None
    ) -> dict[str, list[TokenLogprobs]]:
        if done is not None:
            self._until(done)
        return by_request(plan.prompt_targets, pieces, [read_report(each) for each in downloads])

    def _report(self, hidden: Tensor, piece: PromptRows, adapters: TritonAdapterRows | None) -> Report:
        rows, token_ids = upload(piece.rows, self._ops.device), upload(piece.token_ids, self._ops.device)
        logits = self._forward.logits_of(hidden, rows, adapters)
        return self._reported(logits, token_ids, piece.reports)

    def _reported(self, logits: Tensor, token_ids: Tensor, reports: Reports) -> Report:
        report: Report = self._on_device.report_logprobs(logits, token_ids, reports)
        return report

    def _placed(self, staging: Staging, step: DeviceStep, shape: GraphShape | None) -> tuple[DeviceStep, StepRows]:
        """Return the step padded to the shape, and its rows on the device, which are reused for the same step."""
        if self._uploaded is not None and self._uploaded[0] is step and self._uploaded[1] == shape:
            _, _, padded, at = self._uploaded
            if staging.is_empty:
                return padded, at
        else:
            padded = step if shape is None else step.padded(*shape[:2], self._rows.layout.padding_row)
        at = self._upload(staging, padded)
        self._uploaded = (step, shape, padded, at)
        return padded, at

    def _upload(self, staging: Staging, step: DeviceStep) -> StepRows:
        """Upload the step's differences and apply them to the rows."""
        writes, at = staging.upload(step.rows, step.query_start_loc, step.sample_start_loc, self._ops.device)
        self._on_device.write_rows(self._state, writes)
        return at

    def _hidden(
        self,
        step: DeviceStep,
        inputs: DeviceStepInputs,
        graph: CapturedGraph | None,
        adapters: TritonAdapterRows | None,
    ) -> Tensor:
        """Return normalised hidden states of at least the step's tokens, valid until the next step."""
        return self._forward.hidden(inputs, step.longest, adapters) if graph is None else graph.run()

    def _logits(
        self,
        step: DeviceStep,
        inputs: DeviceStepInputs,
        graph: CapturedGraph | None,
        adapters: TritonAdapterRows | None,
    ) -> Tensor:
        """Return the logits of the requests that sample."""
        if graph is None:
            return self._forward.logits(inputs, step.longest, adapters)
        if graph.shape.is_decode:
            return graph.run()[: len(step.rows)]
        return self._forward.logits_of(graph.run(), inputs.last_tokens[: step.num_sampled], adapters)

    def _inputs(self, step: DeviceStep) -> DeviceStepInputs:
        sizes = (step.num_tokens, len(step.rows), step.num_sampled)
        return DeviceStepInputs.empty(*sizes, self._rows.layout, self._ops.device)

    def _sampling_rows(self, max_rows: int) -> SamplingRows:
        return SamplingRows(max_rows, self.info.vocab_size, counts_on(self._ops.device, self._forward.columns))

    def _make_rows(self) -> None:
        info, max_num_seqs = self.info, self._max_num_seqs
        padding_blocks, states = list(self.kv_cache.padding_blocks), None
        if info.kinds[-1].state:
            states = StateRows(max_num_seqs, info.block_size, padding_blocks.pop())
        # A model without keys and values has one table, which nothing reads.
        num_tables = max(1, len(padding_blocks))
        layout = RowLayout.of(max_num_seqs, info.max_model_len, info.block_size, num_tables)
        if states is not None:
            layout = layout._replace(states_every=info.block_size, most_proposed=info.most_proposed or 0)
        self._rows = DeviceRows(layout, self._adapters, states)
        self._state = RowState(layout, padding_blocks, self._ops.device)
        if self._drafter is not None:
            self._drafter.use(self._rows, self._state, self._sampling, info)

    def _build(self, at: StepRows, step: DeviceStep, inputs: DeviceStepInputs, states: StateBatch = NO_STATES) -> None:
        """Build a step's inputs. `states`: of its requests; further ones are padding."""
        build, block_size = self._on_device.build_inputs, self.info.block_size
        build(self._state, at, step.longest, step.num_sampled, block_size, inputs)
        if inputs.states is not None:
            inputs.states.fill(states, self.kv_cache.padding_blocks[-1])

    def _sample(self, plan: StepPlan, at: StepRows, step: DeviceStep, logits: Tensor, settings: Tensor) -> InFlight:
        drawn, batch = self._draw(plan, step, logits, settings)
        self._on_device.advance_rows(self._state, at, drawn.tokens)
        self._rows.advance(step)
        if step.num_sampled == 0:
            return InFlight([])
        request_ids = step.request_ids
        if len(step.sampling) < len(request_ids):
            request_ids = [request_ids[i] for i in step.sampling.tolist()]
        read = partial(self._read, drawn.download(), _mark(self._ops.device))
        return InFlight(request_ids, read, batch.reports, plan.proposals)

    def _draw(
        self, plan: StepPlan, step: DeviceStep, logits: Tensor, settings: Tensor
    ) -> tuple[DeviceSample, SamplingBatch]:
        rows = np.repeat(step.rows, np.diff(step.sample_start_loc))
        batch = SamplingBatch()
        if not self._sampling.plain[rows].all():
            batch = self._sampling.batch_beside_draws(rows.astype(np.int64), self._rows.num_generated(step))
        if plan.proposals and batch.penalties is not None:
            proposed = _proposed(plan, step)[batch.penalties.rows]
            batch = batch._replace(penalties=batch.penalties._replace(proposed=proposed))
        if plan.token_masks:
            batch = batch._replace(masks=self._masks(plan, [step.request_ids[i] for i in step.sampling.tolist()]))
        return self._drawn(logits, batch, settings[: NUM_SETTINGS * len(rows)], self._sampling, rows), batch

    def _masks(self, plan: StepPlan, request_ids: list[str]) -> TokenMasks | None:
        """Return the masks of the tokens that these requests sample."""
        return mask_rows(masks_of(plan, request_ids))

    def _drawn(
        self, logits: Tensor, batch: SamplingBatch, settings: Tensor, sampling: SamplingRows, rows: NDArray[Any]
    ) -> DeviceSample:
        """Draw tokens. settings: of the draws, on the device; rows: those of `sampling` that are drawn."""
        found: DeviceSample = self._on_device.draw_tokens(logits, batch, settings)
        return found

    def _read(self, drawn: DeviceSample, done: torch.cuda.Event | None) -> SampledTokens:
        if done is not None:
            self._until(done)
        return drawn.read()

    def _until(self, done: torch.cuda.Event) -> None:
        """Wait until the device has come to a mark."""
        done.synchronize()

    def _record(self) -> None:
        if self._graphs is None or self._make_capturer is None:
            return
        with torch.inference_mode():
            capturer = self._make_capturer()
            self._graphs.capture(capturer, self._fill_with_padding)
            if self._drafter is not None:
                self._drafter.capture(self._shapes, capturer)

    def _fill_with_padding(self, shape: GraphShape, inputs: DeviceStepInputs) -> None:
        """Fill the inputs with padding tokens, so that a graph is captured from a possible step."""
        step = self._padding_step(shape.num_tokens, shape.num_requests)
        self._build(self._upload(Staging(), step), step, inputs)

    def _padding_step(self, num_tokens: int, num_requests: int) -> DeviceStep:
        return DeviceStep.of_padding(num_tokens, num_requests, self._rows.layout.padding_row)

    def _explained(self, error: Exception) -> Exception:
        """Return `error`, or a `DeviceLostError` if the device no longer works."""
        if self._ops.device.type != "cuda":
            return error
        try:
            torch.cuda.synchronize(self._ops.device)
        except Exception as lost:
            return DeviceLostError(f"The device failed and this process cannot use it any more: {_first_line(lost)}")
        return error


def _result(handle: InFlight, found: SampledTokens) -> StepResult:
    """Build the step's result.

    Non-finite values of a failed request stay in its blocks: GPU kernels read no slot before it is written.
    """
    sampled = by_row(found, handle.reports)
    if not handle.proposals:
        return result_of(handle.request_ids, sampled)
    runs = runs_of(sampled, [handle.proposals.get(name, []) for name in handle.request_ids])
    return result_of_runs(handle.request_ids, sampled, runs)


def _proposed(plan: StepPlan, step: DeviceStep) -> NDArray[np.int64]:
    """Return the proposed token behind which each token is sampled, -1 for the first one of a request."""
    found = np.full(step.num_sampled, -1, dtype=np.int64)
    for place in step.sampling.tolist():
        first, end = step.sample_start_loc[place : place + 2]
        found[first + 1 : end] = plan.proposals.get(step.request_ids[place], ())
    return found


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind all queued work."""
    if device.type == "cpu":
        return None
    mark = torch.cuda.Event(blocking=_has_one_core())  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


@cache
def _has_one_core() -> bool:
    """Whether a wait must not spin, because the HTTP process needs the only core.

    With more cores spinning is faster.
    """
    return usable_cores() < 2


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class DeviceCounts:
    """`sampling.rows.TokenCounts` as tensors of a device."""

    def __init__(self, max_rows: int, columns: tuple[int, int], device: torch.device) -> None:
        """`columns`: of the vocabulary, the first and the one behind the last."""
        self._first, self._end = columns
        shape = (max_rows, self._end - self._first)
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(shape, dtype=torch.int32, device=device)

    def reset(self, row: int, prompt: list[int], output: list[int]) -> None:
        device, size = self.in_prompt.device, self.in_prompt.shape[1]
        self.in_prompt[row].zero_().index_fill_(0, upload(self._own(prompt), device), True)
        counts = np.bincount(self._own(output), minlength=size)
        self.in_output[row].copy_(upload(counts, device, torch.int32))

    def _own(self, token_ids: list[int]) -> NDArray[np.int64]:
        found = np.array(token_ids, dtype=np.int64)
        return found[(found >= self._first) & (found < self._end)] - self._first


def counts_on(device: torch.device, columns: tuple[int, int]) -> Callable[[int, int], DeviceCounts]:
    """Return a function for `SamplingRows.make_counts`. `columns`: those of the vocabulary that are counted."""
    return lambda max_rows, _: DeviceCounts(max_rows, columns, device)
