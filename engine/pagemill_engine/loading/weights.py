"""Opens a model's weights, whatever files they lie in. What they look like then is `source`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pagemill_engine.loading.early_digest import EarlyDigest
from pagemill_engine.loading.gguf_weights import GGUFWeights
from pagemill_engine.loading.packed.folder import PackedFolder
from pagemill_engine.loading.packed.formats import FORMATS
from pagemill_engine.loading.safetensors_folder import SafetensorsFolder
from pagemill_engine.loading.source import WeightSource
from pagemill_protocol.json_file import read_object


def open_weights(
    path: Path, early_digest: EarlyDigest | None = None, stacked: Mapping[str, str] = MappingProxyType({})
) -> WeightSource:
    """The weights of a `.gguf` file or of a Hugging Face folder. Raises `LoadError`.

    `early_digest`: taken already, perhaps of this file. `stacked`: as in `DecoderSpec`.
    """
    if path.is_dir():
        folder = SafetensorsFolder(path, stacked)
        settings = read_object(path / "config.json").get("quantization_config")
        if isinstance(settings, dict) and settings.get("quant_method") in FORMATS:
            return PackedFolder(folder, settings)
        return folder
    return GGUFWeights(path, early_digest)
