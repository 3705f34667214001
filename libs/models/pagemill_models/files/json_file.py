"""Read the JSON files of model folders: bounded size, objects only, clear errors."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from pagemill_models.files.regular_file import exists, open_regular
from pagemill_protocol.source_errors import UnreadableModelError

MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_LARGE_BYTES = 64 * 1024 * 1024
_LARGE = ("tokenizer.json", "model.safetensors.index.json")
"""Files that grow with the vocabulary or with the number of tensors: the largest published ones have 35 MB."""


def read_text(path: Path, root: Path | None = None) -> str:
    """Return the file as UTF-8 text. Raises `UnreadableModelError`.

    `root`: the model's folder, by default the one that contains the file.
    """
    most = MAX_LARGE_BYTES if path.name in _LARGE else MAX_JSON_BYTES
    try:
        with open(open_regular(path, root), "rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise UnreadableModelError(f"`{path}` cannot be read: {error.strerror}.") from error
    if len(raw) > most:
        raise UnreadableModelError(f"`{path}` is larger than {most} bytes.")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise UnreadableModelError(f"`{path}` is not UTF-8 text. Fetch the file again.") from None


def read_object(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises `UnreadableModelError`. `root`: as in `read_text`."""
    return parse_object(read_text(path, root), path)


def parse_object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = _loaded(text)
    except orjson.JSONDecodeError as error:
        raise UnreadableModelError(f"`{path}` is not valid JSON ({str(error)[:120]}). Fetch the file again.") from None
    if not isinstance(value, dict):
        raise UnreadableModelError(f"`{path}` does not hold a JSON object.")
    return value


def _loaded(text: str) -> Any:
    """Return the value of a JSON text. Python writes infinite numbers as `Infinity`, which JSON has not."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if "Infinity" not in text:
            raise
        with suppress(ValueError, RecursionError):
            return json.loads(text)
        raise


def read_optional(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one where the file does not exist. `root`: as in `read_text`."""
    return read_object(path, root) if exists(path) else {}
