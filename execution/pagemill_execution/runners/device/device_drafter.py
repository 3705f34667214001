"""Drafts tokens on a GPU, behind each step and without waiting for it: `runners.drafter` for rows on the device.

How many proposed tokens a step accepts is known to the device alone when this is launched. So a pass computes every
token that the step may have added, and draws behind the last one that it has: what is computed of rejected tokens lies
where the next step's tokens are computed again. Hidden states that a head reads are kept in its cache by each pass of
the model that verifies (`DeviceForward.keep`), and by the head itself behind what it drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ALONE, ForwardContext, ProductContext
from pagemill_execution.decoders.on_torch.decoder import Decoder, DecoderLayer
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.heads import HeadLayers
from pagemill_execution.decoders.on_torch.layers import Layer
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.device.device_forward import DeviceForward
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.device.device_rows import DeviceRows, DeviceStep
from pagemill_execution.runners.device.graphs import GraphCapturer, GraphShape, StepGraphs
from pagemill_execution.runners.drafter import Drafted
from pagemill_execution.sampling.rows import SamplingRows
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows
from pagemill_kernels.gpu.launch import download
from pagemill_kernels.registry import DeviceOps, Ops
from pagemill_kernels.request_rows.layout import (
    NUM_COMPUTED_TOKENS,
    NUM_TOKENS,
    RECORD,
    DeviceStepInputs,
    RowLayout,
    RowState,
    StepRows,
)
from pagemill_kernels.request_rows.staging import upload_together
from pagemill_kernels.sampling.batch import NUM_SETTINGS, SamplingBatch
from pagemill_protocol.report.cache_kinds import FULL

MOST_CAPTURED = 512
"""Most tokens of a captured pass: more are parts of prompts, which take longer than their launches."""


class DeviceHead:
    """A head with the interface of a decoder that `DeviceForward` uses."""

    classifier: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, layers: HeadLayers, target: Decoder, whole: Decoder, token_ids: NDArray[np.int64] | None
    ) -> None:
        """`whole`: has the embedding and head of which `target` may be one rank's part. `token_ids`: the tokens of the
        head's own vocabulary; None: its logits are the target's."""
        self.spec, self.dtype = layers.spec, layers.dtype
        self.layers: list[DecoderLayer] = [layers.layer]
        reads = layers.spec.decoder.reads
        assert reads is not None
        self._read = reads.layers_of(target.spec.num_layers)
        target.keeps_before = frozenset(self._read)
        self._head, self._target, self._whole = layers, target, whole
        self._token_ids = (
            None if token_ids is None else torch.from_numpy(token_ids).to(layers.embedding_norm.weight.device)
        )

    def weight_layers(self) -> Iterator[Layer]:
        """Yield the layers with weights that the target has not."""
        yield from self._head.weight_layers()
        if self._whole is not self._target:
            yield from self._whole.weight_layers()

    def __call__(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        return self._head(token_ids, context)

    def forward_layers(self, layers: Iterable[DecoderLayer], token_ids: Tensor, context: ForwardContext) -> Tensor:
        return self(token_ids, context)

    def compute_logits(self, hidden: Tensor, context: ProductContext = ALONE) -> Tensor:
        """Return logits of the target's vocabulary."""
        if self._token_ids is None:
            return self._whole.compute_logits(hidden)
        own = self._head.compute_logits(hidden)
        logits = own.new_full((len(own), self._target.spec.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._token_ids, own)

    raw_logits = compute_logits

    def states(self, last: Tensor) -> Tensor:
        """Return what the head reads of the tokens of a pass of the target. `last`: what the pass has computed."""
        if self._head.states is None:
            return last
        kept = self._target.kept
        kept = kept + [last] * (len(self._read) - len(kept))  # of an abbreviated pass
        return self._head.states(torch.cat(kept, dim=1).to(self.dtype), ALONE)


class DeviceDraft(NamedTuple):
    """What drafts."""

    model: Decoder | DeviceHead
    kv_cache: DeviceKVCache
    rotations: DeviceRotations
    own_blocks: int
    """Blocks of a row for tokens that the blocks of its sequence have no room for."""

    def resize(self, num_blocks: int, max_rows: int) -> None:
        """Allocate blocks: as many as the model that verifies has, with its padding block, and those of the rows."""
        self.kv_cache.resize((num_blocks + 1 + max_rows * self.own_blocks,), (FULL,))


class DraftForward(DeviceForward):
    def __init__(self, draft: DeviceDraft, ops: Ops, on_device: DeviceOps, block_size: int, vocab_size: int) -> None:
        super().__init__(draft.model, ops, on_device, draft.kv_cache, draft.rotations, block_size)
        self._head = draft.model if isinstance(draft.model, DeviceHead) else None
        self._vocab_size = vocab_size
        if self._head is not None:
            self._first_key = 1  # the first token has no pair

    def empty_logits(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._vocab_size, dtype=torch.float32, device=self._ops.device)

    def logits_of(self, hidden: Tensor, rows: Tensor, adapters: TritonAdapterRows | None = None) -> Tensor:
        """Return logits of the vocabulary of the model that verifies: files pad equal vocabularies differently."""
        logits = super().logits_of(hidden, rows, adapters)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size].contiguous()

    def decode_into(self, logits: Tensor, inputs: DeviceStepInputs, adapters: TritonAdapterRows | None = None) -> None:
        hidden = self.hidden(inputs, 1, adapters)
        every = torch.arange(len(hidden), device=hidden.device)
        self.keep_drafted(inputs, every, hidden)
        logits.copy_(self.logits_of(hidden, every, adapters))

    def keep_states(self, inputs: DeviceStepInputs, last: Tensor) -> None:
        """Keep what a head reads of the tokens of a pass of the model that verifies."""
        if self._head is not None:
            self._store(inputs.slots[0], self._head.states(last))

    def keep_drafted(self, inputs: DeviceStepInputs, tokens: Tensor, hidden: Tensor) -> None:
        """Keep what a head has computed of some tokens, behind which it drafts."""
        if self._head is not None:
            self._store(inputs.slots[0][tokens], hidden[tokens])

    def _store(self, slots: Tensor, states: Tensor) -> None:
        kept = self._kept()
        kept.index_copy_(0, slots, states.to(kept.dtype))

    def _kept(self) -> Tensor:
        """Return the hidden states in the head's cache by slot."""
        states = self._kv_cache.layers[-1]
        assert isinstance(states, Tensor)
        return states.flatten(0, 2)

    def _given(self, inputs: DeviceStepInputs) -> Tensor | None:
        """Return the hidden states that a head reads: those of the tokens before."""
        if self._head is None:
            return None
        places = torch.arange(len(inputs.positions), device=inputs.positions.device, dtype=torch.int32)
        requests = torch.searchsorted(inputs.query_start_loc[1:], places, right=True)
        requests = requests.clamp_(max=len(inputs.seq_lens) - 1)
        before = (inputs.positions - 1).clamp_(min=0)
        blocks = inputs.block_tables[0][requests, before // self._block_size].long()
        return self._kept()[blocks * self._block_size + before % self._block_size]


class DraftRows:
    """`request_rows.layout.RowState` of the rows that draft: counters and block tables of their own, the same
    tokens."""

    def __init__(self, state: RowState, padding_block: int) -> None:
        layout, device = state.layout, state.values.device
        self.layout: RowLayout = layout._replace(num_kinds=1)
        self.records = torch.zeros(layout.num_rows, RECORD, dtype=torch.int32, device=device)
        shape = (1, layout.num_rows, layout.table_width)
        self.tables = torch.full(shape, padding_block, dtype=torch.int32, device=device)
        self.tokens = state.tokens


class DeviceDrafter:
    def __init__(self, draft: DeviceDraft, ops: Ops, on_device: DeviceOps, info: RunnerInfo) -> None:
        """`info`: of the model that verifies."""
        self.draft = draft
        self.forward = DraftForward(draft, ops, on_device, info.block_size, info.vocab_size)
        self._device, self._on_device = ops.device, on_device
        self._graphs: StepGraphs | None = None
        decoder = draft.model.spec.decoder
        self._num_embedded = decoder.embedding.num_rows

    def use(self, rows: DeviceRows, state: RowState, sampling: SamplingRows, info: RunnerInfo) -> None:
        """Draft for these rows from now on; of what they had, nothing is known. `info`: the runner's."""
        max_rows = rows.layout.padding_row
        self._rows, self._state, self._sampling, self._info = rows, state, sampling, info
        self._num_blocks = self.draft.kv_cache.counts[0] - 1 - max_rows * self.draft.own_blocks
        self.own = DraftRows(state, self._num_blocks)
        self._computed = np.zeros(max_rows, dtype=np.int64)
        """Tokens of each row that the model that verifies has computed, as far as is known."""
        self._drafted = np.zeros(max_rows, dtype=np.int64)
        """Those that what drafts has computed, too."""

    def begin(self, row: int, num_computed_tokens: int, *, is_new: bool) -> None:
        """Note that a request got a row, or other tokens, and what its blocks contain."""
        before = num_computed_tokens if is_new else int(self._drafted[row])
        self._computed[row], self._drafted[row] = num_computed_tokens, min(before, num_computed_tokens)

    def accept(self, row: int, num_tokens: int) -> None:
        """Count proposed tokens that a request sampled; the step with them was computed here, too."""
        self._computed[row] += num_tokens
        self._drafted[row] += num_tokens

    def capture(self, shapes: list[GraphShape], capturer: GraphCapturer) -> None:
        captured = [each for each in shapes if each.num_tokens <= MOST_CAPTURED]
        self._graphs = StepGraphs(self.forward, captured, self.own.layout, self._info.max_model_len)
        self._graphs.capture(capturer, self._fill_with_padding)

    def forget_graphs(self) -> None:
        self._graphs = None

    def run(self, drafts: Mapping[str, int], step: DeviceStep) -> Callable[[], Drafted] | None:
        """Queue the tokens of a step that was queued and counted, and up to `drafts[request]` tokens behind some of its
        requests. Returns a function that waits for these, or None if nothing is queued."""
        rows, size = step.rows.astype(np.int64), self._info.block_size
        lengths = np.diff(step.query_start_loc).astype(np.int64)
        num_proposed = np.maximum(np.diff(step.sample_start_loc) - 1, 0)
        starts, ends = self._drafted[rows], self._computed[rows] + lengths
        room = self._info.max_model_len - self._rows.num_tokens[rows] - num_proposed
        wanted = np.minimum(np.array([drafts.get(name, 0) for name in step.request_ids], dtype=np.int64), room)
        wanted = np.maximum(wanted, 0)
        is_due = (wanted > 0) | (lengths > 1) | (ends // size > starts // size)
        self._computed[rows] = ends - num_proposed
        self._drafted[rows[is_due]] = (ends - num_proposed)[is_due]
        due = np.flatnonzero(is_due & (ends - starts + (wanted > 0) > 0))
        if not len(due):
            return None
        began = self._mark()
        counts = (ends - starts + (wanted > 0))[due]
        tokens = [self._pass(rows[due], counts, starts[due], wanted[due] > 0, 0)]
        active, firsts, place = due[wanted[due] > 0], self._mark(), 1
        names = [[step.request_ids[index] for index in active.tolist()]]
        while len(active := active[wanted[active] > place]):
            every = np.ones(len(active), dtype=np.int64)
            tokens.append(self._pass(rows[active], every, None, every > 0, place))
            names.append([step.request_ids[index] for index in active.tolist()])
            place += 1
        on_host = [download(each) for each in tokens if each is not None]
        has_prompts = bool(counts.max() > 2 * size)
        marks = (began, firsts, self._mark())
        return lambda: _read(names, on_host, marks, has_prompts=has_prompts)

    def warm_up(self, num_requests: int, num_tokens: int) -> None:
        """Run a pass of padding requests and draw behind them."""
        padding = np.full(num_requests, self._rows.layout.padding_row, dtype=np.int64)
        share, rest = divmod(num_tokens, num_requests)
        counts = np.full(num_requests, share, dtype=np.int64)
        counts[:rest] += 1
        self._pass(padding, counts, None, np.ones(num_requests, dtype=np.bool_), 0)
        self.own.records[-1].zero_()  # what was drawn is counted there

    def _pass(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64], starts: NDArray[np.int64] | None,
        draws: NDArray[np.bool_], place: int,
    ) -> Tensor | None:  # fmt: skip
        """Compute `counts` tokens of rows, and draw one behind those that draw; return these.

        `starts`: the first token of each; None: only the last one is computed, which was drawn. `place`: tokens that
        were drafted before."""
        sampled = np.flatnonzero(draws)
        queries, samples = (np.concatenate(([0], np.cumsum(each))).astype(np.int32) for each in (counts, draws))
        step = DeviceStep([], rows.astype(np.int32), queries, samples, int(counts.max()), sampled)
        graph = None if self._graphs is None else self._graphs.graph_for(step)
        padded = step if graph is None else step.padded(*graph.shape[:2], self._rows.layout.padding_row)
        own_blocks = self._rows.num_blocks[0][rows] if starts is not None else rows
        parts = [padded.rows, padded.query_start_loc, padded.sample_start_loc, sampled, own_blocks]
        parts += [] if starts is None else [starts]
        at_rows, at_query, at_sample, of_draws, num_blocks, *given = upload_together(
            [each.astype(np.int32) for each in parts], self._device
        )
        at, of_rows = StepRows(at_rows, at_query, at_sample), at_rows[: len(rows)].long()
        if given:
            self._set(of_rows, num_blocks, given[0])
        else:
            records = self.own.records
            records[of_rows, NUM_COMPUTED_TOKENS] = (records[of_rows, NUM_TOKENS] - 1).clamp_(min=0)
        inputs = self._empty(step) if graph is None else graph.inputs
        self._build(at, padded, inputs)
        last = inputs.last_tokens[: len(sampled)]
        if given and len(sampled):
            index = of_draws.long()
            known = self.own.records[of_rows[index], NUM_TOKENS] - 1
            last.copy_(at_query[index] + known - given[0][index])
        if graph is not None and graph.shape.is_decode:
            logits = graph.run()[: len(rows)]
        else:
            hidden = self.forward.hidden(inputs, step.longest) if graph is None else graph.run()
            if not len(sampled):
                return None
            self.forward.keep_drafted(inputs, last, hidden)
            logits = self.forward.logits_of(hidden, last)
        return self._draw(logits, inputs.settings, rows[sampled], of_rows[of_draws.long()], place)

    def _draw(self, logits: Tensor, settings: Tensor, rows: NDArray[np.int64], at: Tensor, place: int) -> Tensor:
        """Draw a token for each row with the key with which the token at this place will be drawn, and write it."""
        batch = SamplingBatch()
        if (rows < len(self._computed)).all():  # no padding rows
            generated = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows] + place
            batch = self._sampling.batch_of_drafts(rows, generated)._replace(draws=None)
        tokens: Tensor = self._on_device.draw_tokens(logits, batch, settings[: NUM_SETTINGS * len(rows)]).tokens
        places = self.own.records[at, NUM_TOKENS]
        self.own.tokens[at, places.long()] = tokens.clamp(min=0).int()
        self.own.records[at, NUM_TOKENS] = places + 1
        return tokens

    def _set(self, rows: Tensor, num_blocks: Tensor, starts: Tensor) -> None:
        """Take over what the step has counted. `starts`: the first token that is computed here. The blocks behind those
        of a sequence are the row's own."""
        records = self._state.records[rows]
        records[:, NUM_COMPUTED_TOKENS] = starts
        self.own.records[rows] = records
        beyond = torch.arange(self.own.layout.table_width, device=self._device) - num_blocks[:, None]
        most = self.draft.own_blocks
        own = self._num_blocks + 1 + rows[:, None] * most + beyond.clamp(0, most - 1)
        self.own.tables[0, rows] = torch.where(beyond < 0, self._state.tables[0, rows], own.int())

    def _build(self, at: StepRows, step: DeviceStep, inputs: DeviceStepInputs) -> None:
        build, size = self._on_device.build_inputs, self._info.block_size
        build(self.own, at, step.longest, step.num_sampled, size, inputs)
        inputs.positions.clamp_(max=self._info.max_model_len - 1)  # of tokens that may be rejected
        inputs.token_ids.clamp_(max=self._num_embedded - 1)

    def _empty(self, step: DeviceStep) -> DeviceStepInputs:
        sizes = (step.num_tokens, len(step.rows), step.num_sampled)
        return DeviceStepInputs.empty(*sizes, self.own.layout, self._device)

    def _fill_with_padding(self, shape: GraphShape, inputs: DeviceStepInputs) -> None:
        step = DeviceStep.of_padding(shape.num_tokens, shape.num_requests, self.own.layout.padding_row)
        parts = upload_together([step.rows, step.query_start_loc, step.sample_start_loc], self._device)
        self._build(StepRows(*parts), step, inputs)

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


def _read(
    names: list[list[str]], tokens: list[Tensor], marks: tuple[torch.cuda.Event | float, ...], *, has_prompts: bool
) -> Drafted:
    """Wait for what was drafted. `names`: the requests of each place."""
    last = marks[-1]
    if isinstance(last, torch.cuda.Event):
        last.synchronize()
    found: dict[str, list[int]] = {}
    for place, (of_place, each) in enumerate(zip(names, tokens, strict=False)):
        for name, token_id in zip(of_place, each.tolist(), strict=True):
            drafted = found.setdefault(name, [])
            if token_id >= 0 and len(drafted) == place:  # none behind one that was not finite
                drafted.append(token_id)
    if not found:
        return Drafted({}, 0.0)
    took_ms = _between(marks[0], marks[2])
    if len(tokens) > 1 and has_prompts:  # parts of prompts are no part of drafting
        took_ms = _between(marks[1], marks[2]) * len(tokens) / (len(tokens) - 1)
    return Drafted(found, took_ms)


def _between(one: torch.cuda.Event | float, other: torch.cuda.Event | float) -> float:
    if isinstance(one, torch.cuda.Event):
        assert isinstance(other, torch.cuda.Event)
        ms: float = one.elapsed_time(other)
        return ms
    assert not isinstance(other, torch.cuda.Event)
    return (other - one) * 1000
