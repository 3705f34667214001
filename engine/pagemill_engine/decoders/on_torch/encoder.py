"""An encoder that torch computes: whole prompts, without a cache. `native.encoder` is the counterpart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill_engine.decoders.on_torch.context import ForwardContext
from pagemill_engine.decoders.on_torch.decoder import Decoder
from pagemill_engine.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_engine.decoders.on_torch.encoder_attention import plan_rectangles
from pagemill_engine.decoders.on_torch.filling import weight_bytes
from pagemill_kernels.arrays import Array
from pagemill_kernels.gpu.launch import upload
from pagemill_kernels.registry import Ops
from pagemill_kernels.torch_arrays import from_torch


class TorchEncoder:
    def __init__(
        self, model: Decoder, ops: Ops, rotations: DeviceRotations, classifier: Callable[[Array], Array] | None
    ) -> None:
        self.classifier = classifier
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
