"""Weights in a Hugging Face folder: `model.safetensors`, or shards with `model.safetensors.index.json`.

Files are mapped, tensors converted straight into their destination: no second full copy. Only the safetensors format is
read; pickled checkpoints could run code and are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill_engine.loading.codes import CodeKind
from pagemill_engine.loading.digest import StoredTensor, digest_tensors
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.loading.source import stored_bytes
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_protocol.safetensors_header import INDEX_FILE, shard_paths, weight_map
from pagemill_protocol.sources import UnreadableModelError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_REMEDY = "Fetch the folder again and compare its files with the publisher's."


class SafetensorsFolder:
    """`WeightSource` over all shards of a folder. Raises `LoadError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner: dict[str, Any] = {}
        try:
            shards, promised = shard_paths(folder), weight_map(folder)
        except UnreadableModelError as error:
            raise LoadError("ModelUnreadable", error.message) from error
        for shard in shards:
            handle = _open(shard)
            self._owner.update(dict.fromkeys(handle.keys(), handle))
        _check_index(set(promised), set(self._owner), folder)
        self._shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._owner.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read_into(self, name: str, out: Tensor) -> None:
        tensor = self._owner[name].get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise LoadError(
                "UnsupportedQuantization",
                f"`{self._folder}`: tensor `{name}` has type {tensor.dtype}. "
                "Use a float32, float16 or bfloat16 checkpoint.",
            )
        out.copy_(tensor)

    def code_kind(self, name: str) -> CodeKind | None:
        return None

    def read_codes(self, name: str) -> GroupCodes | None:
        return None

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        stored = self._owner[name].get_slice(name)
        return stored.get_dtype() == "BF16" and len(stored.get_shape()) == 2

    def num_bytes(self, dtype: torch.dtype, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self.shapes)

    def digest(self) -> str:
        tensors = {name: handle.get_tensor(name) for name, handle in self._owner.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        return digest_tensors(
            (StoredTensor(name, str(t.dtype), tuple(t.shape), _bytes_of(t)) for name, t in tensors.items()), total
        )


def _check_index(promised: set[str], held: set[str], folder: Path) -> None:
    absent = sorted(promised - held)
    if absent:
        raise LoadError(
            "ModelUnreadable",
            f"`{folder / INDEX_FILE}` lists tensors that no shard holds: {', '.join(absent[:5])}. {_REMEDY}",
        )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LoadError("ModelUnreadable", f"`{path}` cannot be read as safetensors: {error}. {_REMEDY}") from error


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return data
