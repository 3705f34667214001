"""A `WeightSource` over a folder with packed matrices, each under the one name that the model uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

import numpy as np

from pagemill_execution.weights.codes import CodeKind
from pagemill_execution.weights.floats import copy_floats
from pagemill_execution.weights.packed.formats import Format
from pagemill_execution.weights.packed.matrix import PackedMatrix, Settings, unsupported
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_execution.weights.source import CutWeights, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.sharding.slices import Slices


class PackedFolder:
    """Packed matrices of a folder, and the folder's other tensors unchanged."""

    def __init__(self, folder: SafetensorsFolder, form: Format, settings: Settings, keeps_small_floats: bool) -> None:
        """Find the packed matrices. Raises `LoadError` for settings and tensors that do not match.

        `keeps_small_floats`: whether 8-bit floats and floats of a table stay quantized.
        """
        self._folder = folder
        found = form.matrices(settings, folder)
        if not found:
            raise unsupported(
                folder, f"`quant_method` {settings['quant_method']} and the folder no tensor in that form"
            )
        self._form, self._settings, self._keeps_small_floats = form, settings, keeps_small_floats
        self._matrices: dict[str, PackedMatrix] = self._kept(found)
        parts = {part for matrix in self._matrices.values() for part in matrix.parts}
        self._shapes: dict[str, tuple[int, ...]] = {
            **{name: shape for name, shape in folder.shapes.items() if name not in parts},
            **{name: matrix.shape for name, matrix in self._matrices.items()},
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read_into(self, name: str, out: Array) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._folder.read_into(name, out)
        else:
            copy_floats(matrix.floats(), out)

    def code_kind(self, name: str) -> CodeKind | None:
        matrix = self._matrices.get(name)
        return self._folder.code_kind(name) if matrix is None else matrix.kind

    def read_codes(self, name: str) -> GroupCodes | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._folder.read_codes(name)
        return None if matrix.codes is None else matrix.codes()

    def read_blocks(self, name: str) -> CodeBlocks | None:
        return None

    def is_bfloat16(self, name: str) -> bool:
        return name not in self._matrices and self._folder.is_bfloat16(name)

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self.shapes)

    def digest(self) -> str:
        return self._folder.digest()

    def cut(self, slices: Slices) -> CutWeights:
        """Cut packed matrices where no value shares an entry of a stored tensor with one that is left out."""
        folder, left = self._folder.cut({name: slices[name] for name in slices.keys() - self._matrices.keys()})
        assert isinstance(folder, SafetensorsFolder)
        parts: Slices = {}
        shapes: dict[str, Array] = {}
        for name in slices.keys() & self._matrices.keys():
            matrix = self._matrices[name]
            found = matrix.parts_of(slices[name])
            if found is None:
                left = {**left, name: slices[name]}
                continue
            parts |= found
            if matrix.shape_part is not None:
                shapes[matrix.shape_part] = np.array(slices[name].shape_of(matrix.shape))
        cut = copy(self)
        cut._folder = folder
        cut._matrices = self._kept(self._form.matrices(self._settings, _StoredParts(self._folder, parts, shapes)))
        cut._shapes = {
            name: cut._matrices[name].shape if name in self._matrices else folder.shapes[name] for name in self._shapes
        }
        return CutWeights(cut, left)

    def _kept(self, found: dict[str, PackedMatrix]) -> dict[str, PackedMatrix]:
        return {name: each if self._keeps_small_floats else each.without_small_floats() for name, each in found.items()}


class _StoredParts:
    """The stored tensors of a folder, of which some are parts: a format finds smaller matrices in them."""

    def __init__(self, folder: SafetensorsFolder, parts: Slices, shapes: Mapping[str, Array]) -> None:
        """`shapes`: the contents of tensors that contain a matrix's shape."""
        self._folder, self._parts, self._shapes = folder, parts, shapes
        self.where, self.has, self.dtype = folder.where, folder.has, folder.dtype

    def names(self) -> Iterable[str]:
        return self._folder.names()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._parts.get(name)
        return self._folder.shape(name) if found is None else found.shape_of(self._folder.shape(name))

    def read(self, name: str) -> Array:
        given = self._shapes.get(name)
        return self._folder.read(name, self._parts.get(name)) if given is None else given
