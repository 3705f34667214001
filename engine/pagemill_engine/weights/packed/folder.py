"""A `WeightSource` over a folder with packed matrices, each under the one name that the model uses."""

from __future__ import annotations

from copy import copy

from pagemill_engine.weights.codes import CodeKind
from pagemill_engine.weights.floats import copy_floats
from pagemill_engine.weights.packed.formats import Format
from pagemill_engine.weights.packed.matrix import PackedMatrix, Settings, unsupported
from pagemill_engine.weights.safetensors_folder import SafetensorsFolder
from pagemill_engine.weights.source import CutWeights, stored_bytes
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
        self._matrices: dict[str, PackedMatrix] = {
            name: matrix if keeps_small_floats else matrix.without_small_floats() for name, matrix in found.items()
        }
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
        """Cut what is not packed: values of packed matrices are spread over several tensors."""
        folder, left = self._folder.cut({name: slices[name] for name in slices.keys() - self._matrices.keys()})
        assert isinstance(folder, SafetensorsFolder)
        cut = copy(self)
        cut._folder = folder
        cut._shapes = {
            name: shape if name in self._matrices else folder.shapes[name] for name, shape in self._shapes.items()
        }
        return CutWeights(cut, {**left, **{name: slices[name] for name in slices.keys() & self._matrices.keys()}})
