"""Opens a model's weights, whatever files they lie in. What they look like then is `source`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pagemill_engine.loading.early_digest import EarlyDigest
from pagemill_engine.loading.gguf_weights import GGUFWeights
from pagemill_engine.loading.safetensors_folder import SafetensorsFolder
from pagemill_engine.loading.source import WeightSource


def open_weights(
    path: Path, early_digest: EarlyDigest | None = None, stacked: Mapping[str, str] = MappingProxyType({})
) -> WeightSource:
    """The weights of a `.gguf` file or of a Hugging Face folder. Raises `LoadError`.

    `early_digest`: taken already, perhaps of this file. `stacked`: as in `DecoderSpec`.
    """
    if path.is_dir():
        return SafetensorsFolder(path, stacked)
    return GGUFWeights(path, early_digest)
