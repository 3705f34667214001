"""One forward pass over inputs on the device, up to the logits of the tokens that sample.

It only launches kernels and reads nothing, so that a pass can be recorded (`runners.device.graphs`) as well as run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ForwardContext, ProductContext, RowsContext
from pagemill_execution.decoders.on_torch.decoder import DecoderLayer
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_kernels.adapters.triton_launch import TritonAdapterRows
from pagemill_kernels.ranks.distributed import DistributedGroup
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.registry import DeviceOps, Ops
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout
from pagemill_models.spec.model_spec import ModelSpec


class ComputedModel(Protocol):
    """What a pass needs of a decoder, or of a head that drafts."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layers(self) -> list[DecoderLayer]: ...

    def forward_layers(self, layers: Iterable[DecoderLayer], token_ids: Tensor, context: ForwardContext) -> Tensor: ...

    def compute_logits(self, hidden: Tensor, context: ProductContext) -> Tensor: ...

    def raw_logits(self, hidden: Tensor, context: ProductContext) -> Tensor: ...


class Neighbours(NamedTuple):
    """The groups through which a rank computes a pass with others."""

    stage: DistributedGroup | None = None
    """The ranks that divide its layers and its vocabulary; None: it has them alone."""
    before: RankGroup[Tensor] | None = None
    """This rank and the one that sends it hidden states; None: it embeds tokens."""
    behind: RankGroup[Tensor] | None = None
    """This rank and the one that it sends hidden states to; None: it computes logits."""


ALONE = Neighbours()


class DeviceForward:
    def __init__(
        self,
        model: ComputedModel,
        ops: Ops,
        on_device: DeviceOps,
        kv_cache: DeviceKVCache,
        rotations: DeviceRotations,
        block_size: int,
        neighbours: Neighbours = ALONE,
    ) -> None:
        self._model = model
        self._ops, self._on_device = ops, on_device
        self._kv_cache = kv_cache
        self._rotations = rotations
        self._block_size = block_size
        self._neighbours = neighbours
        self.has_head = neighbours.behind is None
        self.columns = (model.spec.decoder.vocabulary or (0, model.spec.vocab_size)) if self.has_head else (0, 0)
        """Of the vocabulary, whose logits this rank computes."""
        self._first_key = 0
        self.keep: Callable[[DeviceStepInputs, Tensor], None] | None = None
        """Takes the hidden states of each pass, for a head that reads them; part of what is recorded."""
        self._layers = model.layers
        self._kinds: list[DecoderLayer] = []

    def empty_inputs(self, num_tokens: int, num_requests: int, layout: RowLayout) -> DeviceStepInputs:
        """Return empty inputs for `num_requests` requests, all of which sample."""
        return DeviceStepInputs.empty(num_tokens, num_requests, num_requests, layout, self._ops.device)

    def empty_logits(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.columns[1] - self.columns[0], dtype=torch.float32, device=self._ops.device)

    def empty_hidden(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, self._model.spec.hidden_size)
        return torch.empty(shape, dtype=self._model.dtype, device=self._ops.device)

    @contextmanager
    def abbreviated(self) -> Iterator[None]:
        """Run passes through only one layer of each kind.

        They compile, load and tune everything that a whole pass does, at a fraction of its launches. Their results are
        meaningless. Of several ranks all passes are whole: layers may be of other kinds on each, and all must exchange
        the same.
        """
        if self._neighbours != ALONE:
            yield
            return
        self._layers = self._kinds = self._kinds or one_of_each(self._model.layers)
        try:
            yield
        finally:
            self._layers = self._model.layers

    def logits(self, inputs: DeviceStepInputs, longest: int, adapters: TritonAdapterRows | None = None) -> Tensor:
        """Return float32 [sampled, columns]. `longest`: tokens of the request that has most tokens in the step.

        `adapters`: of the step's tokens.
        """
        return self.logits_of(self.hidden(inputs, longest, adapters), inputs.last_tokens, adapters)

    def logits_of(self, hidden: Tensor, rows: Tensor, adapters: TritonAdapterRows | None = None) -> Tensor:
        """Return the logits of `rows` of the hidden states, float32 [rows, columns]. `adapters`: of all of these.

        A rank without a head returns none.
        """
        if not self.has_head:
            return self.empty_logits(0)
        of_rows = RowsContext(None if adapters is None else adapters.at(rows))
        return self._model.compute_logits(self._ops.gather_rows(hidden, rows), of_rows)

    def decode_into(self, logits: Tensor, inputs: DeviceStepInputs, adapters: TritonAdapterRows | None = None) -> None:
        """Decode requests with one token each, all of which sample. `logits`: float32 [requests, columns]."""
        hidden = self.hidden(inputs, 1, adapters)
        if self.has_head:
            logits.copy_(self._model.raw_logits(hidden, RowsContext(adapters)))

    def hidden_into(self, hidden: Tensor, inputs: DeviceStepInputs, adapters: TritonAdapterRows | None = None) -> None:
        """Run a pass for requests with any numbers of tokens and store the hidden states."""
        hidden.copy_(self.hidden(inputs, len(hidden), adapters))

    def hidden(self, inputs: DeviceStepInputs, longest: int, adapters: TritonAdapterRows | None = None) -> Tensor:
        """Return normalised hidden states, [tokens, hidden]; those between two layers if another rank goes on."""
        given, behind = self._given(inputs), self._neighbours.behind
        plan, num_requests = self._on_device.plan_attention, len(inputs.seq_lens)
        kind_of = self._kv_cache.kind_of
        context = ForwardContext(
            positions=inputs.positions,
            rotations=self._rotations.at(inputs.positions),
            kv_caches=self._kv_cache.layers,
            kv_slots={window: inputs.slots[kind] for window, kind in kind_of.items()},
            attention_plans={
                window: plan(inputs, num_requests, longest, kind, window, self._block_size, self._first_key)
                for window, kind in kind_of.items()
            },
            hidden=given,
            adapters=adapters,
            group=self._neighbours.stage,
            states=self._states_of(inputs, longest),
        )
        found = self._model.forward_layers(self._layers, inputs.token_ids, context)
        if behind is not None:
            behind.send(found, 1 - behind.rank)
        if self.keep is not None:
            self.keep(inputs, found)
        return found

    def _states_of(self, inputs: DeviceStepInputs, longest: int) -> Any:
        """Return the plan of recurrent layers; None: there are none."""
        if inputs.states is None:
            return None
        num_tokens, plan = len(inputs.token_ids), self._on_device.plan_states
        return plan(inputs.query_start_loc, inputs.states, num_tokens, longest, self._block_size)

    def _given(self, inputs: DeviceStepInputs) -> Tensor | None:
        """Return the hidden states that the rank before this one sends; None: this one embeds tokens."""
        before = self._neighbours.before
        if before is None:
            return None
        given = self.empty_hidden(len(inputs.token_ids))
        before.receive(given, 1 - before.rank)
        return given


def one_of_each(layers: Iterable[DecoderLayer]) -> list[DecoderLayer]:
    """Return the first layer of each kind, in order."""
    return list({_kind(layer): layer for layer in reversed(list(layers))}.values())[::-1]


def _kind(layer: DecoderLayer) -> tuple[Any, ...]:
    declared = msgspec.json.encode(layer.spec).replace(f'"{layer.spec.name}'.encode(), b'"')
    return declared, *(_held(each.held()) for each in layer.layers())


def _held(value: Any) -> Any:
    """Return everything that launches can depend on. Triton compiles pointers divisible by 16 separately."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.data_ptr() % 16 == 0
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), *map(_held, value)
    if fields := getattr(value, "__dict__", None):
        return type(value), *((name, _held(each)) for name, each in fields.items())
    # Other objects are equal only if they are the same object.
    return type(value), id(value)
