"""Select the files of a repository that make the model. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath

from pagemill_models.adapters.limits import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pagemill_models.files.gguf_split import part_names
from pagemill_models.files.regular_file import MODULES_FILE
from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.schemes.hugging_face import MODEL_PATTERNS
from pagemill_protocol.source_errors import FetchError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_LAYOUT = "consolidated*.safetensors"
"""The same weights in the layout of another program."""


_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
"""Files of sentence-transformers' modules, which lie in folders of their own."""


def select_files(name: str, wanted: str | None, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files to load. Raises `FetchError` when they do not make a model.

    `name`: the repository's name in messages; `wanted`: a single GGUF file, or `None` for the whole model.
    """
    if any(file.is_archive for file in files):
        return _safe(list(files))
    if wanted is not None:
        by_path = {file.path: file for file in files}
        for part in part_names(wanted):
            if part not in by_path:
                raise FetchError("ModelNotFound", f"{name} has no file `{part}`. {_listing(files)}")
        return _safe([by_path[part] for part in part_names(wanted)])
    paths = {file.path for file in files}
    if "config.json" not in paths:
        return _only_gguf(name, files)
    has_modules = MODULES_FILE in paths
    chosen = [file for file in files if _belongs(file.path) or (has_modules and _MODULE.fullmatch(file.path))]
    if ONE_FILE in paths or INDEX in paths:
        chosen = [file for file in chosen if not fnmatch(file.path, OTHER_LAYOUT)]
    return _safe(chosen)


def select_adapter_files(name: str, wanted: str | None, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files of an adapter, as `select_files` those of a model."""
    if wanted is not None or any(file.is_archive for file in files):
        return select_files(name, wanted, files)
    by_path = {file.path: file for file in files}
    if ADAPTER_CONFIG not in by_path and any(path.endswith(".gguf") for path in by_path):
        return _only_gguf(name, files)
    if ADAPTER_CONFIG not in by_path:
        raise FetchError("AdapterNotFound", f"{name} has no `{ADAPTER_CONFIG}`: it is no adapter that PEFT wrote.")
    if ADAPTER_WEIGHTS not in by_path:
        why = "is a pickle, which could run code" if "adapter_model.bin" in by_path else "is missing"
        what = "`adapter_model.bin`" if "adapter_model.bin" in by_path else f"`{ADAPTER_WEIGHTS}`"
        remedy = "Save the adapter with save_pretrained(..., safe_serialization=True), and upload it again."
        raise FetchError("AdapterUnsupported", f"{name}: {what} {why}. {remedy}")
    return [by_path[ADAPTER_CONFIG], by_path[ADAPTER_WEIGHTS]]


def _only_gguf(name: str, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files of the only GGUF model, in one part or several."""
    models = {part_names(file.path)[0] for file in files if file.path.endswith(".gguf")}
    by_path = {file.path: file for file in files}
    parts = part_names(models.pop()) if len(models) == 1 else []
    if not parts or not all(part in by_path for part in parts):
        raise FetchError("ModelUnreadable", f"{name} has no `config.json`. {_listing(files)}")
    return _safe([by_path[part] for part in parts])


def _belongs(path: str) -> bool:
    return "/" not in path and any(fnmatch(path, pattern) for pattern in MODEL_PATTERNS)


def _safe(files: list[RemoteFile]) -> list[RemoteFile]:
    """Refuse paths outside the model's folder, through which a server could write elsewhere."""
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise FetchError("ModelUnreadable", f"the source names the file `{file.path}`, which is outside the model")
    return files


def _listing(files: Sequence[RemoteFile]) -> str:
    names = sorted(file.path for file in files if file.path.endswith(".gguf"))
    if not names:
        return "Use one with safetensors weights and a config.json, or one with GGUF files."
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"Name one of its GGUF files after a slash: {', '.join(names[:10])}{more}."
