"""Reads the values of an adapter: A and B by linear layer, and the digest of its content.

Copies of the base's matrices are compared and left out. Files are read by `pread`: one that shrinks or grows meanwhile
is refused, not half read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pagemill_execution.decoders.row_order import ungrouped
from pagemill_execution.weights.dequantize import dequantize_into, supported_types
from pagemill_kernels.arrays import NUMPY_TYPES, Array, widened
from pagemill_models.adapters.errors import unreadable, unsupported
from pagemill_models.adapters.parts import AdapterFiles, LowRank, SavedCopy
from pagemill_models.files.regular_file import open_regular
from pagemill_models.files.safetensors_header import TensorHeader
from pagemill_models.sharding.linears import LinearUse
from pagemill_protocol.source_errors import UnreadableModelError

_TYPES = {"F32": NUMPY_TYPES["float32"], "F16": NUMPY_TYPES["float16"], "BF16": NUMPY_TYPES["bfloat16"]}
_INFINITE = 0x7F80
"""Bits of the infinite bfloat16: those of other values without a sign that are not finite are larger."""
_ROUNDING = 2.0**-7
"""Relative difference of a saved copy: one of both may be rounded to bfloat16."""

Pause = Callable[[], None]
"""Called between tensors: may let the steps of the engine go on."""


class BaseMatrix(NamedTuple):
    """A matrix of the base as its files have it."""

    values: Array
    """float32 [rows, columns]."""
    steps: Array | None = None
    """float32 [rows]: the largest difference of two neighbouring values that quantization left in a row; None: the
    matrix is stored as floats."""


ReadBase = Callable[[str], BaseMatrix]
"""Returns a matrix of the base by its stored name."""


class PartOfAdapter(NamedTuple):
    """What an adapter adds to some stored rows of a linear layer."""

    use: LinearUse
    first_row: int
    a: Array
    """[rank, in], float32 or the bits of bfloat16."""
    b: Array
    """float32 [rows, rank], multiplied by the scale."""


class AdapterValues(NamedTuple):
    digest: str
    """Of the values and their scales: adapters of one digest answer alike."""
    rank: int
    parts: list[PartOfAdapter]


def read_values(files: AdapterFiles, base: ReadBase, pause: Pause = lambda: None) -> AdapterValues:
    """Read and check all tensors. Raises `AdapterError`."""
    try:
        descriptor = open_regular(files.path)
    except UnreadableModelError as error:
        raise unreadable(error.message) from None
    try:
        before = os.fstat(descriptor)
        reader = _Reader(descriptor, files.path, pause)
        for copy in files.copies:
            _compare(copy, widened(reader.read(copy.header)), base(copy.stored_name))
        parts = [_part(low, reader) for low in files.parts]
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise unreadable(f"`{files.path}` changed while it was read. Load the adapter again once it is complete.")
    scales = sorted((low.use.number, low.first_row, low.scale, low.heads) for low in files.parts)
    reader.hasher.update(msgspec.json.encode(scales))
    return AdapterValues(reader.hasher.hexdigest()[:32], max(low.rank for low in files.parts), parts)


class _Reader:
    """Reads each tensor once: those of stacked experts have many parts."""

    def __init__(self, descriptor: int, path: Path, pause: Pause) -> None:
        self._descriptor, self._path, self._pause = descriptor, path, pause
        self._kept: dict[str, Array] = {}
        self.hasher = hashlib.sha256()  # processors have instructions for it

    def read(self, header: TensorHeader) -> Array:
        """Return the tensor as float32, or as the bits of bfloat16. Raises `AdapterError`."""
        if header.name not in self._kept:
            self._pause()
            raw = np.empty(header.num_bytes, dtype=np.uint8)
            start = 0
            while start < len(raw):
                count = os.preadv(self._descriptor, [raw[start:].data], header.offset + start)
                if count == 0:
                    raise unreadable(f"`{self._path}` ends within tensor `{header.name}`. Fetch it again.")
                start += count
            self.hasher.update(f"{header.name}|{header.dtype}|{header.shape}|".encode())
            self.hasher.update(raw.data)
            values = self._values(header, raw)
            if not _is_finite(values):
                raise unsupported(f"Tensor `{header.name}` has values that are not finite.")
            self._kept[header.name] = values
        return self._kept[header.name]

    def _values(self, header: TensorHeader, raw: Array) -> Array:
        if header.dtype in _TYPES:
            values = raw.view(_TYPES[header.dtype]).reshape(header.shape)
            return values if header.dtype == "BF16" else widened(values)
        if header.dtype not in supported_types():
            raise unsupported(f"Tensor `{header.name}` is stored as {header.dtype}. Use float16, bfloat16 or Q8_0.")
        values = np.empty(header.shape, dtype=np.float32)
        dequantize_into(header.dtype, raw, values)
        return values


def _is_finite(values: Array) -> bool:
    if values.dtype == np.uint16:
        return int((values & 0x7FFF).max(initial=0)) < _INFINITE
    return bool(np.isfinite(values).all())


def _part(low: LowRank, reader: _Reader) -> PartOfAdapter:
    a, b = reader.read(low.a), reader.read(low.b)
    trained = low.use.spec.trained_groups
    if low.is_converted:
        a, b = _unconverted(low, a, b)
    elif low.expert is not None:
        a = a.reshape(low.num_experts, low.rank, -1)[low.expert]
        b = b.reshape(len(b), low.rank, low.num_experts)[:, :, low.expert]
        if low.swapped:
            a, b = b.T, a.T
    if trained is not None and not low.is_converted and len(b) == low.use.spec.out_features:
        b = b[ungrouped(trained)]
    return PartOfAdapter(low.use, low.first_row, np.ascontiguousarray(a), widened(b) * np.float32(low.scale))


def _unconverted(low: LowRank, a: Array, b: Array) -> tuple[Array, Array]:
    """Return A [rank, in] and B [out, rank] of a GGUF file's tensors, with the rows of B as the base stores them."""
    if low.expert is not None:
        a, b = a[low.expert], b[low.expert]
    if low.use.is_table:
        a = a.T
    if low.heads:
        b = b.reshape(low.heads, -1, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
    stored = next(
        each for each, rows in zip(low.use.spec.parts, low.use.stored(), strict=True) if rows.end > low.first_row
    )
    if stored.groups is not None:
        grouped = np.empty_like(b)
        grouped[ungrouped(stored.groups)] = b
        b = grouped
    return a, b


def _compare(copy: SavedCopy, values: Array, base: BaseMatrix) -> None:
    shape = base.values.shape
    if values.shape == shape[::-1] != shape:
        values = values.T
    if values.shape != shape or not _equal(values, base):
        raise unsupported(
            f"Tensor `{copy.header.name}` is a copy of `{copy.stored_name}` and differs from this model's: trained "
            "matrices are not served beside LoRA. If it was not trained, save the adapter again with "
            "save_embedding_layers=False; else merge the adapter into a copy of the model."
        )


def _equal(values: Array, base: BaseMatrix) -> bool:
    """Whether a copy is the base's matrix: before quantization its values were at most one step away."""
    difference: Any = np.abs(values - base.values)
    allowed: Any = _ROUNDING * np.abs(base.values)
    if base.steps is not None:
        allowed += base.steps[:, None]
    return bool((difference <= allowed).all())
