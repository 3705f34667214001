"""Weights in a GGUF file, under Hugging Face names and in Hugging Face row order.

The model's family defines the names. Converters store the query and key projections of some architectures with the two
rotary halves of each head interleaved, and the value heads of delta rules in another order; reading undoes this by
reordering rows of stored bytes, which costs little compared with dequantizing. Where value heads are columns, whole
groups of codes are reordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.weights.codes import CODE_KINDS, CodeKind, has_blocks, read_blocks, read_codes
from pagemill_execution.weights.dequantize import PLAIN, dequantize_into, supported_types
from pagemill_execution.weights.digest import REMOTE_READERS, gguf_digest
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.files import RemoteBytes, WeightFiles
from pagemill_execution.weights.floats import copy_floats
from pagemill_execution.weights.source import CutWeights, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import GROUP_SIZE, CodeBlocks, GroupCodes
from pagemill_models.declaration.family import GGUFNames
from pagemill_models.declaration.gguf_values import LONG_ROPE
from pagemill_models.declaration.known import unsupported
from pagemill_models.files.gguf_file import GGUFFile, GGUFTensor
from pagemill_models.sharding.slices import Slices, TensorSlice
from pagemill_models.spec.spec_from_gguf import family_of
from pagemill_protocol.source_errors import SourceError

_MATRIX, _FACTOR = ".weight", ".scale"
_BESIDE = (_FACTOR, ".input_scale")
"""Endings of what files hold beside a matrix: a factor of its values, and one of activations, which is not used."""


class GGUFWeights:
    """`WeightSource` over one file. Raises `LoadError` for corrupt files and unsupported storage types."""

    def __init__(self, path: Path, early_digest: EarlyDigest | None = None) -> None:
        self._file = GGUFFile(path)
        self._files = WeightFiles(self._file.paths)
        self._early_digest = early_digest
        self._path = path
        self._names = _names(self._file)
        tensors = self._file.tensors
        beside = {name for name in tensors for ending in _BESIDE if name.removesuffix(ending) + _MATRIX in tensors}
        beside -= {name for name in beside if self._names.hugging_face_name(name) != name}
        held = [each for name, each in tensors.items() if name not in LONG_ROPE and name not in beside]
        self._tensors = dict(part for each in held for part in self._parts(each))
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._cuts: Slices = {}
        self._check_types()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read_into(self, name: str, out: Array) -> None:
        tensor = self._tensors[name]
        plain, factor, columns = PLAIN.get(tensor.ggml_type.name), self._factor(name), self._order(tensor, 1)
        is_logarithm = self._names.in_a_layer(tensor.name) in self._names.logarithms
        if factor is not None or columns is not None or is_logarithm:
            values = np.empty(out.shape, dtype=np.float32)
            dequantize_into(tensor.ggml_type.name, self._stored(name), values)
            values = values if columns is None else values[:, columns]
            if is_logarithm:
                values = self._logarithms(tensor, values)
            copy_floats(values if factor is None else values * factor, out)
        elif plain is not None and self._is_ordered(tensor) and name not in self._cuts:
            self._files.fill_floats(tensor.part, tensor.offset, plain, out)
        else:
            dequantize_into(tensor.ggml_type.name, self._stored(name), out)

    def _logarithms(self, tensor: GGUFTensor, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if not (values <= 0).all():
            raise LoadError(
                "ModelUnreadable",
                f"`{self._path}`: tensor `{tensor.name}` holds {values.max()}; its values must be 0 or less. Convert "
                "the model again.",
            )
        with np.errstate(divide="ignore"):
            return np.log(-values)

    def code_kind(self, name: str) -> CodeKind | None:
        tensor = self._tensors[name]
        kind = CODE_KINDS.get(tensor.ggml_type.name)
        return kind if kind is None or self._keeps_groups(tensor, kind.group_size) else None

    def read_codes(self, name: str) -> GroupCodes | None:
        if self.code_kind(name) is None:
            return None
        tensor = self._tensors[name]
        codes, factor = read_codes(tensor.ggml_type.name, self._stored(name), self._shapes[name]), self._factor(name)
        if (columns := self._order(tensor, 1)) is not None:
            codes = codes.with_columns(columns)
        return codes if factor is None else codes.times(factor)

    def read_blocks(self, name: str) -> CodeBlocks | None:
        tensor = self._tensors[name]
        kind, columns = tensor.ggml_type.name, self._order(tensor, 1)
        if not has_blocks(kind) or self._factors(name) is not None or not self._keeps_groups(tensor, GROUP_SIZE):
            return None
        blocks = read_blocks(kind, self._stored(name), self._shapes[name])
        return blocks if blocks is None or columns is None else blocks.with_columns(columns)

    def is_bfloat16(self, name: str) -> bool:
        tensor = self._tensors[name]
        return tensor.ggml_type.name == "BF16" and len(tensor.shape) == 2 and self._factors(name) is None

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self._tensors)

    def digest(self) -> str:
        early = self._early_digest.of(self._path) if self._early_digest is not None else None
        if early or not self._files.is_remote:
            return early or gguf_digest(self._file)

        def data(tensor: GGUFTensor) -> RemoteBytes:
            return RemoteBytes(self._files, tensor.part, tensor.offset, tensor.num_bytes)

        return gguf_digest(self._file, data, REMOTE_READERS)

    def cut(self, slices: Slices) -> CutWeights:
        """Cut rows, those of interleaved heads by whole heads, and columns by whole blocks, in which parts of blocks
        are left to be cut."""
        cut, left = copy(self), dict(slices)
        cut._cuts = {}
        for name, found in slices.items():
            if self._order(self._tensors[name], 1) is not None:
                continue
            cut._cuts[name], left[name] = found.in_units(self._unit(name, found))
            if left[name].size == cut._cuts[name].size:
                del left[name]
        parts = {name: found.shape_of(self._shapes[name]) for name, found in cut._cuts.items()}
        cut._shapes = {**self._shapes, **parts}
        return CutWeights(cut, left)

    def _unit(self, name: str, found: TensorSlice) -> int:
        tensor = self._tensors[name]
        if found.dimension == 1:
            return tensor.ggml_type.block_elements
        num_heads = self._interleaved_heads(tensor.name)
        return tensor.shape[0] // num_heads if num_heads else 1

    def _stored(self, name: str) -> NDArray[np.uint8]:
        """Return the tensor's bytes, or those of its part, with its rows in Hugging Face order."""
        tensor, found = self._tensors[name], self._cuts.get(name)
        num_rows, num_heads, form = tensor.shape[0], self._interleaved_heads(tensor.name), tensor.ggml_type
        order = self._order(tensor, 0)
        if found is None:
            data = self._files.read(tensor.part, tensor.offset, tensor.num_bytes)
            data = data if order is None else data.reshape(num_rows, -1)[order].reshape(-1)
        elif order is not None:
            row_bytes = tensor.num_bytes // num_rows
            rows = np.concatenate([order[first:end] for first, end in found.ranges])
            runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
            parts = (
                self._files.read(tensor.part, tensor.offset + run[0] * row_bytes, len(run) * row_bytes) for run in runs
            )
            data = np.concatenate(list(parts))
        else:
            row_bytes = tensor.num_bytes // num_rows
            in_bytes = found
            if found.dimension == 1:
                scaled = tuple(
                    (first // form.block_elements * form.block_bytes, end // form.block_elements * form.block_bytes)
                    for first, end in found.ranges
                )
                in_bytes = TensorSlice(1, scaled)
            whole = (num_rows, row_bytes)
            part = np.empty(in_bytes.shape_of(whole), dtype=np.uint8)
            self._files.fill_part(tensor.part, tensor.offset, part.dtype, whole, in_bytes, part)
            data, num_heads, num_rows = part.reshape(-1), num_heads * len(part) // num_rows, len(part)
        return _uninterleave(data, num_rows, num_heads) if num_heads else data

    def _parts(self, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """Yield the tensor under its Hugging Face name; a tensor of all experts (`*` in the name) once per expert."""
        name, shape = self._names.hugging_face_name(tensor.name), self._names.shape(tensor.name, tensor.shape)
        tensor = tensor._replace(shape=shape)
        if "*" not in name:
            yield name, tensor
            return
        num_bytes = tensor.num_bytes // shape[0]
        for index in range(shape[0]):
            part = tensor._replace(shape=shape[1:], offset=tensor.offset + index * num_bytes, num_bytes=num_bytes)
            yield name.replace("*", str(index)), part

    def _factors(self, name: str) -> GGUFTensor | None:
        """Return the tensor of what a matrix's values are multiplied by, which converters of NVFP4 write: one number,
        or one for each expert of a tensor."""
        stored = self._tensors[name].name
        factor = stored.removesuffix(_MATRIX) + _FACTOR
        is_other = not stored.endswith(_MATRIX) or self._names.hugging_face_name(factor) != factor
        return None if is_other else self._file.tensors.get(factor)

    def _factor(self, name: str) -> np.float32 | None:
        found = self._factors(name)
        if found is None:
            return None
        tensor = self._tensors[name]
        whole = self._file.tensors[tensor.name]
        if found.ggml_type.name != "F32" or found.num_elements not in (1, whole.num_bytes // tensor.num_bytes):
            what = f"{found.ggml_type.name} {list(found.shape)}"
            raise LoadError(
                "ModelUnreadable",
                f"`{self._path}`: tensor `{found.name}` is {what}; F32 is wanted, one number for `{tensor.name}` or "
                "one for each of its experts. Convert the model again.",
            )
        values = self._files.read(found.part, found.offset, found.num_bytes).view(np.float32)
        factor: np.float32 = values[(tensor.offset - whole.offset) // tensor.num_bytes if len(values) > 1 else 0]
        return factor

    def _check_types(self) -> None:
        for tensor in self._tensors.values():
            if tensor.ggml_type.name not in supported_types():
                raise LoadError(
                    "UnsupportedQuantization",
                    f"`{self._path}`: tensor `{tensor.name}` is stored as {tensor.ggml_type.name}. "
                    f"Use a file in one of {', '.join(supported_types())} (K-quants such as Q4_K_M are made of these).",
                )

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads of a tensor whose rows are interleaved; 0 for other tensors."""
        key = self._names.heads_key(name)
        if key is None:
            return 0
        architecture = self._file.metadata["general.architecture"]
        num_heads = self._file.metadata[f"{architecture}.attention.head_count"]
        found = self._file.metadata.get(f"{architecture}.{key}", num_heads)
        # A value per layer; the family requires equal ones, but for layers without heads.
        return int(max(found) if isinstance(found, list) else found)

    def _is_ordered(self, tensor: GGUFTensor) -> bool:
        """Whether rows are stored in Hugging Face's order."""
        return not self._interleaved_heads(tensor.name) and self._order(tensor, 0) is None

    def _keeps_groups(self, tensor: GGUFTensor, size: int) -> bool:
        """Whether columns in Hugging Face's order consist of whole stored groups of so many."""
        columns = self._order(tensor, 1)
        return columns is None or bool((columns.reshape(-1, size) - columns[::size, None] == np.arange(size)).all())

    def _order(self, tensor: GGUFTensor, dimension: int) -> NDArray[np.int64] | None:
        """Return the stored index of each row (0) or column (1); None where the orders are the same."""
        place = self._names.tiled.get(self._names.in_a_layer(tensor.name))
        if place is None or place.dimension != dimension:
            return None
        prefix = f"{self._file.metadata['general.architecture']}.ssm"
        num_keys, num_values = (self._file.metadata[f"{prefix}.{key}"] for key in ("group_count", "time_step_rank"))
        if num_keys == num_values:
            return None
        size = self._file.metadata[f"{prefix}.inner_size"] // num_values if place.whole else 1
        heads = np.arange(num_values).reshape(-1, num_keys).T.reshape(-1)
        of_heads = (heads[:, None] * size + np.arange(size)).reshape(-1)
        before = tensor.shape[dimension] - len(of_heads)
        return np.concatenate([np.arange(before), before + of_heads])


def _names(file: GGUFFile) -> GGUFNames:
    """Return the names of the file's family. Raises `LoadError`."""
    try:
        name, found = family_of(file)
        names = found.family.gguf_names
        if names is None:
            raise unsupported(name, file.path, " in a GGUF file")
    except SourceError as error:
        raise LoadError(error.reason, error.message) from error
    return names


def _uninterleave(data: NDArray[np.uint8], num_rows: int, num_heads: int) -> NDArray[np.uint8]:
    """Move rows (2i, 2i + 1) of each head to (i, half + i)."""
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
