"""Frees a device's memory during sleep: the KV cache, and weights in the device's own memory.

Weights move to the host's memory. Tensors stay the same objects: only their storage is freed and allocated again, at
another address. If the weights are in the host's memory anyway, nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from pagemill_execution.decoders.on_torch.decoder import Model
from pagemill_execution.decoders.on_torch.filling import weight_tensors
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.sleep import SleepError
from pagemill_servers.process.malloc import trim_heap


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


class HostWeights:
    """Storages of weights, each with a copy while offloaded."""

    def __init__(self, storages: list[UntypedStorage]) -> None:
        self._storages = storages
        self._sizes = [storage.nbytes() for storage in storages]
        self._copies: list[Tensor] = []

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> HostWeights:
        """Collect the storages of the tensors; views of one storage count once."""
        storages = (tensor.untyped_storage() for tensor in tensors)
        return cls(list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def offload(self) -> None:
        """Move the weights to the host. Raises `SleepError`, with nothing moved, if the host's memory is too small."""
        try:
            self._copies = [_copy(storage) for storage in self._storages]
        except (RuntimeError, MemoryError) as error:
            self._copies = []
            raise SleepError(
                f"The host does not have memory for {self.num_bytes / 1024**3:.1f} GiB of weights ({error}). Raise "
                "resources.memory, or do not let the engine sleep."
            ) from error
        for storage in self._storages:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in self._storages):
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move the weights back. Raises what allocating on the device raises."""
        for storage, size, copy in zip(self._storages, self._sizes, self._copies, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage in self._storages):
            # The copies may be freed only once they have been read.
            torch.cuda.synchronize()
        self._copies = []
        if any(storage.device.type == "cuda" for storage in self._storages):
            torch._C._host_emptyCache()  # otherwise torch's allocator keeps the pinned memory


def _copy(storage: UntypedStorage) -> Tensor:
    """Return a copy, in pinned memory if that makes copying back faster."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage))


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
