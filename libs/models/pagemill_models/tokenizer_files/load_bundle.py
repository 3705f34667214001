"""Build the TokenizerBundle of a model: `gguf_tokenizer` reads GGUF files, `hf_folder` Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from pagemill_models.files.gguf_file import GGUFFile
from pagemill_models.files.missing_values import warn_once
from pagemill_models.tokenizer_files.gguf_tokenizer import bundle_from_gguf
from pagemill_models.tokenizer_files.hf_folder import bundle_from_folder
from pagemill_protocol.tokenizer_bundle import TokenizerBundle


def load_bundle(path: str | Path) -> TokenizerBundle:
    """Return the bundle of the model at `path`: a `.gguf` file or a Hugging Face folder. Raises `SourceError`."""
    path = Path(path)
    bundle = bundle_from_folder(path) if path.is_dir() else bundle_from_gguf(GGUFFile(path))
    if bundle.chat_template is not None and not bundle.eos_token_ids:
        keys = "`eos_token_id` of generation_config.json" if path.is_dir() else "`tokenizer.ggml.eos_token_id`"
        warn_once(f"`{path}` names no end of answers: they end at their limit only. Add {keys}.")
    return bundle
