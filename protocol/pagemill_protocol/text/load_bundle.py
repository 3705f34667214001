"""Build the TokenizerBundle of a model: `gguf_tokenizer` reads GGUF files, `hf_folder` Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from pagemill_protocol.gguf_file import GGUFFile
from pagemill_protocol.text.bundle import TokenizerBundle
from pagemill_protocol.text.gguf_tokenizer import bundle_from_gguf
from pagemill_protocol.text.hf_folder import bundle_from_folder


def load_bundle(path: str | Path) -> TokenizerBundle:
    """Return the bundle of the model at `path`: a `.gguf` file or a Hugging Face folder. Raises `SourceError`."""
    path = Path(path)
    return bundle_from_folder(path) if path.is_dir() else bundle_from_gguf(GGUFFile(path))
