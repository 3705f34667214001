"""Weights in a Hugging Face folder: `model.safetensors`, or shards with `model.safetensors.index.json`.

Tensors are read straight into their destination, and converted piece by piece if their type differs. Only the
safetensors format is read; pickled checkpoints could run code and are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pagemill_execution.weights.codes import CODE_KINDS, CodeKind, mxfp4_pairs
from pagemill_execution.weights.digest import REMOTE_READERS, StoredTensor, TensorBytes, digest_tensors
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.files import RemoteBytes, WeightFiles
from pagemill_execution.weights.floats import copy_floats
from pagemill_execution.weights.source import CutWeights, stored_bytes
from pagemill_kernels.arrays import NUMPY_TYPES, Array, FloatType
from pagemill_kernels.huge_pages import empty_weights
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.files.safetensors_header import INDEX_FILE, TensorHeader, read_shard, shard_paths, weight_map
from pagemill_models.sharding.slices import Slices, TensorSlice
from pagemill_protocol.source_errors import UnreadableModelError

_FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": NUMPY_TYPES["float32"],
    "F16": NUMPY_TYPES["float16"],
    "BF16": NUMPY_TYPES["bfloat16"],
}
_READ: dict[str, np.dtype[Any]] = {
    **_FLOATS,
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Array types of stored tensors by safetensors' type names."""
_DIGEST_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Type names in the digest.

They are torch's, as in earlier versions, whose caches may contain blocks of these weights.
"""
_REMEDY = "Fetch the folder again and compare its files with the publisher's."

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors of a matrix in MXFP4."""


class _Stored(NamedTuple):
    file: int
    header: TensorHeader


class _Part(NamedTuple):
    stored_name: str
    row: int | None = None
    """Index in the tensor's first dimension; None: the whole tensor."""
    pieces: int = 1
    """Parts into which each of the second dimension's rows are divided, all of which count as first dimension."""


class SafetensorsFolder:
    """`WeightSource` over all shards of a folder. Raises `LoadError`."""

    def __init__(self, folder: Path, stacked: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> None:
        """Open the shards. `stacked`: as in `DecoderSpec`; a tensor of all experts is split into one per expert."""
        self._folder = folder
        try:
            shards, promised = shard_paths(folder), weight_map(folder)
            headers = [read_shard(folder, shard) for shard in shards]
        except UnreadableModelError as error:
            raise LoadError("ModelUnreadable", error.message) from error
        self._shards, self._files = shards, WeightFiles(shards, folder)
        self._stored = {each.name: _Stored(file, each) for file, found in enumerate(headers) for each in found}
        _check_index(set(promised), set(self._stored), folder)
        self._parts = dict(part for name in self._stored for part in self._parts_of(name, stacked))
        self._shapes = {name: self._shape(part) for name, part in self._parts.items()}
        self._cuts: Slices = {}

    @property
    def where(self) -> str:
        return f"`{self._folder}`"

    def names(self) -> Iterable[str]:
        """Return the names of the stored tensors, for `has`, `shape`, `dtype` and `read`."""
        return self._stored.keys()

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].header.shape

    def dtype(self, name: str) -> str:
        return self._stored[name].header.dtype

    def read(self, name: str, found: TensorSlice | None = None) -> Array:
        """Return a stored tensor, or some of its rows or columns."""
        if found is None:
            return self._read(_Part(name))
        file, header = self._stored[name]
        out = np.empty(found.shape_of(header.shape), dtype=self._read_type(name))
        self._files.fill_part(file, header.offset, out.dtype, header.shape, found, out)
        return out

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read_into(self, name: str, out: Array) -> None:
        codes = self.read_codes(name)
        if codes is not None:
            copy_floats(codes.dequantize(), out)
            return
        part = self._parts[name]
        file, header = self._stored[part.stored_name]
        if header.dtype not in _FLOATS:
            raise self._no_floats(name, part)
        offset, dtype, found = _offset(part, header), _FLOATS[header.dtype], self._cuts.get(name)
        if found is None:
            self._files.fill_floats(file, offset, dtype, out)
        else:
            self._files.fill_part(file, offset, dtype, self._shape(part), found, out)

    def code_kind(self, name: str) -> CodeKind | None:
        return CODE_KINDS["MXFP4"] if self._is_mxfp4(self._parts[name]) else None

    def read_codes(self, name: str) -> GroupCodes | None:
        if self.code_kind(name) is None:
            return None
        part = self._parts[name]
        scales_name = part.stored_name.removesuffix(BLOCKS) + SCALES
        wanted = self.shape(part.stored_name)[:-1]
        if scales_name not in self._stored or self.shape(scales_name) != wanted:
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

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self.shapes)

    def digest(self) -> str:
        self._files.wait_for_all()
        mapped = [] if self._files.is_remote else [np.memmap(shard, np.uint8, "r") for shard in self._shards]

        def data(file: int, header: TensorHeader) -> TensorBytes:
            if not mapped:
                return RemoteBytes(self._files, file, header.offset, header.num_bytes)
            return np.asarray(mapped[file][header.offset : header.offset + header.num_bytes])

        tensors = [
            StoredTensor(
                header.name,
                f"torch.{_DIGEST_NAMES.get(header.dtype, header.dtype)}",
                header.shape,
                data(file, header),
            )
            for file, header in self._stored.values()
        ]
        total_bytes = sum(header.num_bytes for _, header in self._stored.values())
        return digest_tensors(tensors, total_bytes, 1 if mapped else REMOTE_READERS)

    def cut(self, slices: Slices) -> CutWeights:
        """Cut floats: codes of MXFP4 are read whole."""
        cut = copy(self)
        cut._cuts = {name: found for name, found in slices.items() if not self._is_mxfp4(self._parts[name])}
        parts = {name: found.shape_of(self._shapes[name]) for name, found in cut._cuts.items()}
        cut._shapes = {**self._shapes, **parts}
        return CutWeights(cut, {name: slices[name] for name in slices.keys() - cut._cuts.keys()})

    def _parts_of(self, stored_name: str, stacked: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, _Part]]:
        """Yield the parts of a stored tensor under the names of single experts; other tensors unchanged."""
        ending = next((ending for ending in stacked if stored_name.endswith(ending)), None)
        if ending is None:
            if not any(stored_name.endswith(each.removesuffix(BLOCKS) + SCALES) for each in stacked):
                yield stored_name, _Part(stored_name)
            return
        names = [stored_name.removesuffix(ending) + each for each in stacked[ending]]
        for index in range(*self.shape(stored_name)[:1]):
            for piece, name in enumerate(names):
                part = _Part(stored_name, index * len(names) + piece, len(names))
                yield name.replace("*", str(index)), part

    def _shape(self, part: _Part) -> tuple[int, ...]:
        shape = self.shape(part.stored_name)
        if part.row is not None:
            shape = (*(size // part.pieces for size in shape[1:2]), *shape[2:])
        return (shape[0], shape[1] * shape[2] * 2) if self._is_mxfp4(part) else shape

    def _is_mxfp4(self, part: _Part) -> bool:
        """Whether the part is in MXFP4. Other tensors of that name have a shape that no model uses."""
        if part.row is None or not part.stored_name.endswith(BLOCKS):
            return False
        return self.dtype(part.stored_name) == "U8" and len(self.shape(part.stored_name)) == 4

    def _read(self, part: _Part) -> Array:
        """Return the part as it is stored. Raises `LoadError` for types that are not supported."""
        file, header = self._stored[part.stored_name]
        shape = header.shape if part.row is None else header.shape[1:]
        tensor = empty_weights(shape, self._read_type(part.stored_name))
        self._files.fill(file, _offset(part, header), tensor)
        return tensor

    def _read_type(self, stored_name: str) -> np.dtype[Any]:
        dtype = self.dtype(stored_name)
        if dtype not in _READ:
            raise self._no_floats(stored_name, _Part(stored_name))
        return _READ[dtype]

    def _no_floats(self, name: str, part: _Part) -> LoadError:
        return LoadError(
            "UnsupportedQuantization",
            f"{self.where}: tensor `{name}` has type {self.dtype(part.stored_name)}. "
            "Use a float32, float16 or bfloat16 checkpoint.",
        )


def _check_index(promised: set[str], held: set[str], folder: Path) -> None:
    absent = sorted(promised - held)
    if absent:
        raise LoadError(
            "ModelUnreadable",
            f"`{folder / INDEX_FILE}` lists tensors that no shard holds: {', '.join(absent[:5])}. {_REMEDY}",
        )


def _offset(part: _Part, header: TensorHeader) -> int:
    return header.offset + (0 if part.row is None else part.row * (header.num_bytes // (header.shape[0] * part.pieces)))
