"""Weights in a Hugging Face folder: `model.safetensors`, or shards with `model.safetensors.index.json`.

Files are mapped, tensors converted straight into their destination: no second full copy. Only the safetensors format is
read; pickled checkpoints could run code and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill_engine.loading.codes import CODE_KINDS, CodeKind, mxfp4_pairs
from pagemill_engine.loading.digest import StoredTensor, digest_tensors
from pagemill_engine.loading.errors import LoadError
from pagemill_engine.loading.source import stored_bytes
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_protocol.safetensors_header import INDEX_FILE, shard_paths, weight_map
from pagemill_protocol.source_errors import UnreadableModelError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_REMEDY = "Fetch the folder again and compare its files with the publisher's."

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors that hold a matrix in MXFP4."""


class _Part(NamedTuple):
    stored_name: str
    row: int | None = None
    """In the tensor's first dimension; `None`: all of it."""


class SafetensorsFolder:
    """`WeightSource` over all shards of a folder. Raises `LoadError`."""

    def __init__(self, folder: Path, stacked: Mapping[str, str] = MappingProxyType({})) -> None:
        """`stacked`: as in `DecoderSpec`; what is stored for all experts at once is given for each."""
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
        self._parts = dict(part for name in self._owner for part in self._parts_of(name, stacked))
        self._shapes = {name: self._shape(part) for name, part in self._parts.items()}

    @property
    def where(self) -> str:
        return f"`{self._folder}`"

    def names(self) -> Iterable[str]:
        """Of the stored tensors, as `has`, `shape`, `dtype` and `read` know them."""
        return self._owner.keys()

    def has(self, name: str) -> bool:
        return name in self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._owner[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._owner[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        return self._read(_Part(name))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read_into(self, name: str, out: Tensor) -> None:
        codes = self.read_codes(name)
        if codes is not None:
            out.copy_(codes.dequantize())
            return
        tensor = self._read(self._parts[name])
        if tensor.dtype not in _FLOATS:
            raise LoadError(
                "UnsupportedQuantization",
                f"`{self._folder}`: tensor `{name}` has type {tensor.dtype}. "
                "Use a float32, float16 or bfloat16 checkpoint.",
            )
        out.copy_(tensor)

    def code_kind(self, name: str) -> CodeKind | None:
        return CODE_KINDS["MXFP4"] if self._is_mxfp4(self._parts[name]) else None

    def read_codes(self, name: str) -> GroupCodes | None:
        if self.code_kind(name) is None:
            return None
        part = self._parts[name]
        scales_name = part.stored_name.removesuffix(BLOCKS) + SCALES
        wanted = self.shape(part.stored_name)[:-1]
        if scales_name not in self._owner or self.shape(scales_name) != wanted:
            raise LoadError(
                "ModelUnreadable",
                f"`{self._folder}` has no tensor `{scales_name}` of the shape {list(wanted)}. {_REMEDY}",
            )
        blocks, exponents = self._read(part), self._read(part._replace(stored_name=scales_name))
        return mxfp4_pairs(blocks, exponents)

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        stored_name = self._parts[name].stored_name
        return self.dtype(stored_name) == "BF16" and len(self._shapes[name]) == 2

    def num_bytes(self, dtype: torch.dtype, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self.shapes)

    def digest(self) -> str:
        tensors = {name: handle.get_tensor(name) for name, handle in self._owner.items()}
        total = sum(tensor.nbytes for tensor in tensors.values())
        return digest_tensors(
            (StoredTensor(name, str(t.dtype), tuple(t.shape), _bytes_of(t)) for name, t in tensors.items()), total
        )

    def _parts_of(self, stored_name: str, stacked: Mapping[str, str]) -> Iterator[tuple[str, _Part]]:
        """What a stored tensor is under the names of single experts; itself where it is of none or of one."""
        ending = next((ending for ending in stacked if stored_name.endswith(ending)), None)
        if ending is None:
            if not any(stored_name.endswith(each.removesuffix(BLOCKS) + SCALES) for each in stacked):
                yield stored_name, _Part(stored_name)
            return
        name = stored_name.removesuffix(ending) + stacked[ending]
        for index in range(*self.shape(stored_name)[:1]):
            yield name.replace("*", str(index)), _Part(stored_name, index)

    def _shape(self, part: _Part) -> tuple[int, ...]:
        shape = self.shape(part.stored_name)
        shape = shape if part.row is None else shape[1:]
        return (shape[0], shape[1] * shape[2] * 2) if self._is_mxfp4(part) else shape

    def _is_mxfp4(self, part: _Part) -> bool:
        """Anything else under such a name has a shape that no model asks for."""
        if part.row is None or not part.stored_name.endswith(BLOCKS):
            return False
        return self.dtype(part.stored_name) == "U8" and len(self.shape(part.stored_name)) == 4

    def _read(self, part: _Part) -> Tensor:
        handle, name = self._owner[part.stored_name], part.stored_name
        tensor: Tensor = handle.get_tensor(name) if part.row is None else handle.get_slice(name)[part.row]
        return tensor


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
