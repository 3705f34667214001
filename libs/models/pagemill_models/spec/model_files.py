"""Read the ModelSpec of a model file or folder. No weights are read. `model_spec` defines the spec."""

from __future__ import annotations

from pathlib import Path

from pagemill_models.files.gguf_file import GGUFFile
from pagemill_models.files.safetensors_header import lacks_weights
from pagemill_models.spec.model_spec import ModelSpec, checked
from pagemill_models.spec.spec_from_config import spec_from_folder
from pagemill_models.spec.spec_from_gguf import spec_from_gguf


def load_model_spec(path: str | Path) -> ModelSpec:
    """Return the spec of a `.gguf` file or Hugging Face folder. Raises `SourceError`."""
    path = Path(path)
    if path.is_dir():
        return checked(spec_from_folder(path), path)
    return checked(spec_from_gguf(GGUFFile(path)), path)


def load_spec_without_weights(path: Path) -> ModelSpec:
    """Return the spec as `load_model_spec`, also of a folder that has only the index of its weights.

    Such a spec suffices for a plan, not for an engine. Raises `SourceError`.
    """
    if path.is_dir() and lacks_weights(path):
        return checked(spec_from_folder(path, by_index=True), path)
    return load_model_spec(path)
