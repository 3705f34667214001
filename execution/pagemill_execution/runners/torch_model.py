"""A torch model (`decoders.on_torch`, or a class of transformers) as the CPU runner's `StepModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_execution.decoders.on_torch.context import ForwardContext, RowsContext, StateTensors
from pagemill_execution.decoders.on_torch.decoder import Decoder, Model
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.encoder_attention import plan_rectangles
from pagemill_execution.decoders.on_torch.filling import load_weights, weight_bytes
from pagemill_execution.decoders.rope import decoder_tables
from pagemill_execution.decoders.step_model import LayerCache, StateArrays, StepTokens
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.adapters.rows import AdapterRows
from pagemill_kernels.arrays import Array
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import TORCH_TYPES, from_torch, to_torch
from pagemill_models.spec.model_spec import ModelSpec


def load_torch_model(
    path: Path, spec: ModelSpec, compute: Compute, weights: WeightSource, max_model_len: int
) -> TorchModel:
    """Load a model with its weights. Raises `LoadError` and `WeightsError`."""
    rotations = rotations_of(spec, compute, weights, max_model_len)
    if not spec.decoder.by_transformers:
        return TorchModel(load_decoder(spec, compute, weights), compute.ops, rotations)
    from pagemill_execution.decoders.by_transformers.model import TransformersDecoder

    model = TransformersDecoder(path, spec, compute.ops, TORCH_TYPES[compute.activation_dtype])
    return TorchModel(model, compute.ops, rotations)


def load_decoder(spec: ModelSpec, compute: Compute, weights: WeightSource) -> Decoder:
    """Load a decoder with its weights. Raises `WeightsError`."""
    model = Decoder(spec, compute.ops, TORCH_TYPES[compute.activation_dtype])
    load_weights(model, weights)
    return model


def rotations_of(spec: ModelSpec, compute: Compute, weights: WeightSource, max_model_len: int) -> DeviceRotations:
    tables = decoder_tables(spec.decoder, max_model_len, weights)
    return DeviceRotations(tables, TORCH_TYPES[compute.activation_dtype], compute.ops.device)


def classifier_of(model: Model) -> Callable[[Array], Array] | None:
    """Return the model's classifier as a function of arrays, as in `StepModel`, or None."""
    classify = model.classifier
    if classify is None:
        return None

    def classified(pooled: Array) -> Array:
        with torch.inference_mode():
            return from_torch(classify(to_torch(pooled)))

    return classified


class HostTensorGroup:
    """A group of the host for tensors, which are exchanged as the arrays over their memory."""

    def __init__(self, group: RankGroup[Array]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def all_reduce(self, buffer: Tensor) -> None:
        self._group.all_reduce(from_torch(buffer))

    def gather(self, buffer: Tensor) -> list[Tensor]:
        return [to_torch(each) for each in self._group.gather(from_torch(buffer))]

    def send(self, buffer: Tensor, to: int) -> None:
        self._group.send(from_torch(buffer), to)

    def receive(self, buffer: Tensor, sender: int) -> None:
        self._group.receive(from_torch(buffer), sender)

    def abort(self, reason: str) -> None:
        self._group.abort(reason)


class TorchModel:
    def __init__(
        self,
        model: Model,
        ops: Ops,
        rotations: DeviceRotations,
        group: RankGroup[Array] | None = None,
        *,
        gathers_logits: bool = True,
    ) -> None:
        """Wrap a model whose weights are loaded. `group`: the ranks that compute it together. `gathers_logits`:
        whether its logits are those of all ranks, and not of its part of the vocabulary."""
        self.model = model
        self.spec: ModelSpec = model.spec
        self._ops = ops
        self._rotations = rotations
        self._group = None if group is None else HostTensorGroup(group)
        self._of_logits = self._group if gathers_logits else None
        self._windows = model.spec.decoder.windows()
        self._caches: list[Tensor | StateTensors] = []

    @property
    def num_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        return classifier_of(self.model)

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._caches = [tensors_of(cache) for cache in caches]

    def keep_before(self, layers: Sequence[int]) -> None:
        if layers:
            self._decoder.keeps_before = frozenset(layers)

    @property
    def kept(self) -> list[Array]:
        return [from_torch(each) for each in self._decoder.kept]

    def embed(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Array:
        context = ForwardContext(to_torch(positions), [], [], {}, {}, group=self._group)
        with torch.inference_mode():
            return from_torch(self._decoder.embed(to_torch(token_ids), context))

    @property
    def _decoder(self) -> Decoder:
        assert isinstance(self.model, Decoder), "heads of classes of transformers are refused"
        return self.model

    def hidden(self, step: StepTokens, adapters: AdapterRows | None = None) -> Array:
        with torch.inference_mode():
            return from_torch(self.model(to_torch(step.token_ids), self._context(step, adapters)))

    def logits(self, hidden: Array, adapters: AdapterRows | None = None) -> Array:
        with torch.inference_mode():
            return from_torch(self.model.compute_logits(to_torch(hidden), RowsContext(adapters, self._of_logits)))

    def _context(self, step: StepTokens, adapters: AdapterRows | None) -> ForwardContext:
        ops, positions, caches = self._ops, to_torch(step.positions), step.caches
        return ForwardContext(
            positions=positions,
            rotations=self._rotations.at(positions),
            kv_caches=self._caches,
            kv_slots={window: to_torch(caches[window].slots) for window in self._windows},
            attention_plans={
                window: ops.plan_attention(caches[window].attention, window, self.model.dtype, ops.device)
                for window in self._windows
            },
            adapters=adapters,
            group=self._group,
            hidden=None if step.hidden is None else to_torch(step.hidden),
            states=None if step.states is None else ops.plan_states(step.states),
        )


class TorchEncoder:
    """An encoder: whole prompts without a cache, in the form that `encoder_runner` runs."""

    def __init__(self, model: Decoder, ops: Ops, rotations: DeviceRotations) -> None:
        self.classifier = classifier_of(model)
        self._model, self._ops, self._rotations = model, ops, rotations
        self._windows = model.spec.decoder.windows()
        self.has_token_types = model.token_types is not None

    @property
    def num_bytes(self) -> int:
        return weight_bytes(self._model)

    def hidden(
        self, token_ids: NDArray[np.int64], lengths: Sequence[int], token_types: NDArray[np.int64] | None
    ) -> Array:
        """Return the hidden states of whole prompts one after another, [tokens, hidden]."""
        with torch.inference_mode():
            positions = self._upload(np.concatenate([np.arange(length) for length in lengths]))
            context = ForwardContext(
                positions=positions,
                rotations=self._rotations.at(positions),
                kv_caches=[],
                kv_slots={},
                attention_plans=dict.fromkeys(self._windows, plan_rectangles(lengths, self._ops.device)),
                token_types=None if token_types is None else self._upload(token_types),
            )
            return from_torch(self._model(self._upload(token_ids), context))

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return upload(array, self._ops.device)


def tensors_of(cache: LayerCache) -> Tensor | StateTensors:
    if not isinstance(cache, StateArrays):
        return to_torch(cache)
    states, windows, log, inputs = map(to_torch, cache[:4])
    return StateTensors(states, windows, log, inputs, None if cache.vectors is None else to_torch(cache.vectors))
