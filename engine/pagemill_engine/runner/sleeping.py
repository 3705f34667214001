"""Frees a device's memory during sleep: the KV cache, and weights in the device's own memory."""

from __future__ import annotations

import torch

from pagemill_engine.models.decoder import Model
from pagemill_engine.models.weights import weight_tensors
from pagemill_engine.runner.device_kv_cache import DeviceKVCache
from pagemill_engine.runner.host_weights import HostWeights
from pagemill_protocol.malloc import trim_heap


class SleepingModel:
    """One model and its KV cache."""

    def __init__(self, model: Model, kv_cache: DeviceKVCache, device: torch.device) -> None:
        self._model, self._kv_cache, self._device = model, kv_cache, device
        self._weights: HostWeights | None = None
        """The offloaded weights while asleep, if the device has memory of its own."""

    def sleep(self) -> int:
        if self._device.type == "cuda":
            weights = HostWeights.of(weight_tensors(self._model))
            weights.offload()
            self._weights = weights
        self._kv_cache.release()
        trim_heap()
        return self._kv_cache.num_bytes + (self._weights.num_bytes if self._weights is not None else 0)

    def wake(self) -> None:
        if self._weights is not None:
            self._weights.restore()
            self._weights = None
        self._kv_cache.allocate()
