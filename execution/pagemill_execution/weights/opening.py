"""Opens a model's weights in any supported file format; `source` is their interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.gguf_weights import GGUFWeights
from pagemill_execution.weights.packed.folder import PackedFolder
from pagemill_execution.weights.packed.formats import describe_format, format_of
from pagemill_execution.weights.packed.matrix import Settings
from pagemill_execution.weights.safetensors_folder import SafetensorsFolder
from pagemill_execution.weights.shape_only import ShapeOnlyWeights
from pagemill_execution.weights.source import WeightSource
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_models.spec.spec_from_config import read_config


def open_weights(
    path: Path,
    early_digest: EarlyDigest | None = None,
    stacked: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    keeps_small_floats: bool = False,
) -> WeightSource:
    """Open the weights of a `.gguf` file or of a Hugging Face folder. Raises `LoadError`.

    `early_digest`: a digest that was computed already, perhaps of this file. `stacked`: as in `DecoderSpec`.
    `keeps_small_floats`: whether 8-bit floats and floats of a table stay quantized.
    """
    if path.is_dir():
        folder, settings = SafetensorsFolder(path, stacked), _settings(path)
        form = format_of(settings)
        return folder if form is None else PackedFolder(folder, form, settings, keeps_small_floats)
    return GGUFWeights(path, early_digest)


def shape_only_weights(folder: Path, spec: ModelSpec, keeps_small_floats: bool = False) -> WeightSource:
    """Return weights for sizes only, if the folder has nothing but the index. Raises `LoadError`."""
    return ShapeOnlyWeights(folder, spec, _settings(folder), keeps_small_floats)


def stored_as(path: Path, quantization: str) -> str:
    """Return a description of the stored weights. `quantization`: as in `ModelSpec`."""
    settings = _settings(path) if path.is_dir() else {}
    return describe_format(settings) if settings.get("quant_method") else quantization


def _settings(folder: Path) -> Settings:
    found = read_config(folder).get("quantization_config")
    return found if isinstance(found, dict) else {}
