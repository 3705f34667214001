"""Weights of which only the index is present: sizes follow from names and settings.

This `WeightSource` is for `pagemill plan` on a machine without the model's files: the family declares the shapes, and
the packed formats (`packed.formats`) derive the forms from the names. Reading a tensor is refused. An engine opens
files (`weights`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from pagemill_execution.weights.codes import CODE_KINDS, CodeKind
from pagemill_execution.weights.declared import normalized_weights, transposed_weights
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.packed.formats import format_of
from pagemill_execution.weights.packed.matrix import Settings
from pagemill_execution.weights.safetensors_folder import BLOCKS
from pagemill_execution.weights.source import CutWeights, stored_bytes
from pagemill_kernels.arrays import Array, FloatType
from pagemill_kernels.linear.groups import CodeBlocks, GroupCodes
from pagemill_models.declaration.declaration import DecoderSpec, Shapes
from pagemill_models.files.safetensors_header import INDEX_FILE, read_index
from pagemill_models.sharding.slices import Slices
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_models.spec.stored_names import declared_names


class ShapeOnlyWeights:
    """`WeightSource` without tensors. Raises `LoadError` if the names do not determine the tensors' forms."""

    def __init__(self, folder: Path, spec: ModelSpec, settings: Settings, keeps_small_floats: bool) -> None:
        """Read the index of the folder.

        `settings`: `quantization_config`. `keeps_small_floats`: as for `weights.open_weights`.
        """
        self._folder = folder
        if spec.decoder.by_transformers:
            raise self._absent(f"`{spec.architecture}` is computed by a class that knows its tensors by their files")
        names = frozenset(declared_names(sorted(read_index(folder).names), spec.decoder))
        self._shapes = _shapes_of_present_layers(spec.decoder, names)
        self._kinds = _kinds(names, settings, self._shapes, keeps_small_floats)
        self._kinds |= dict.fromkeys(_mxfp4(names, spec.decoder, self._shapes), CODE_KINDS["MXFP4"])
        self._floats = transposed_weights(spec.decoder) | normalized_weights(spec.decoder)
        """Tensors that are read as floats, in whatever form they are stored."""
        self._is_bfloat16 = spec.dtype == "bfloat16"

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    def code_kind(self, name: str) -> CodeKind | None:
        return None if name in self._floats else self._kinds.get(name)

    def is_bfloat16(self, name: str) -> bool:
        is_matrix = len(self._shapes[name]) == 2 and name not in self._kinds
        return self._is_bfloat16 and is_matrix

    def num_bytes(self, dtype: FloatType, keep_stored: bool) -> int:
        return sum(stored_bytes(self, name, dtype, keep_stored) for name in self._shapes)

    def read_into(self, name: str, out: Array) -> NoReturn:
        raise self._absent(f"`{name}` is to be read")

    def read_codes(self, name: str) -> GroupCodes | None:
        raise self._absent(f"`{name}` is to be read")

    def read_blocks(self, name: str) -> CodeBlocks | None:
        raise self._absent(f"`{name}` is to be read")

    def cut(self, slices: Slices) -> CutWeights:
        return CutWeights(self, slices)

    def digest(self) -> str:
        raise self._absent("a digest is to be taken")

    def _absent(self, why: str) -> LoadError:
        message = f"`{self._folder}` contains `{INDEX_FILE}` without the files that it names, and {why}. Fetch them."
        return LoadError("ModelUnreadable", message)


def _shapes_of_present_layers(decoder: DecoderSpec, names: frozenset[str]) -> Shapes:
    """Return the declared shapes without those of layers of which the index names nothing, such as one that drafts."""
    layers = [layer.name for layer in decoder.layers]
    depth = layers[0].count(".") + 1
    present = {".".join(name.split(".", depth)[:depth]) for name in names}
    absent = tuple(f"{layer}." for layer in layers if layer not in present)
    return {name: shape for name, shape in decoder.shapes().items() if not name.startswith(absent)}


def _kinds(
    names: frozenset[str], settings: Settings, shapes: Shapes, keeps_small_floats: bool
) -> dict[str, CodeKind | None]:
    """Return the forms of the matrices that another project's quantizer packed."""
    found = format_of(settings)
    if found is None:
        return {}
    kinds = {}
    for name, shape in shapes.items():
        base = name.removesuffix(".weight")
        if len(shape) == 2 and base != name and found.is_packed(settings, names, base):
            kind = found.kind(settings, names, base, (shape[0], shape[1]))
            kinds[name] = None if kind is not None and kind.is_float and not keeps_small_floats else kind
    return kinds


def _mxfp4(names: frozenset[str], decoder: DecoderSpec, shapes: Shapes) -> set[str]:
    """Return the names of expert matrices that are stored in MXFP4 blocks for all experts at once."""
    packed = {
        name.removesuffix(ending) + own
        for name in names
        for ending, each in decoder.stacked.items()
        if ending.endswith(BLOCKS) and name.endswith(ending)
        for own in each
    }
    parts = [name.partition("*")[::2] for name in packed]
    by_layer = {(before, after) for before, after in parts}
    return {
        name
        for name in shapes
        for before, after in by_layer
        if name.startswith(before) and name.endswith(after) and name[len(before) : len(name) - len(after)].isdecimal()
    }
