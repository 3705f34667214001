"""Read the JSON files of model folders: bounded size, objects only, clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from pagemill_protocol.source_errors import UnreadableModelError

MAX_JSON_BYTES = 256 * 1024 * 1024


def read_text(path: Path) -> str:
    """Return the file as UTF-8 text. Raises `UnreadableModelError`."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UnreadableModelError(f"`{path}` is larger than {MAX_JSON_BYTES} bytes.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableModelError(f"`{path}` cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise UnreadableModelError(f"`{path}` is not UTF-8 text. Fetch the file again.") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises `UnreadableModelError`."""
    return parse_object(read_text(path), path)


def parse_object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnreadableModelError(f"`{path}` is not valid JSON ({error}). Fetch the file again.") from None
    if not isinstance(value, dict):
        raise UnreadableModelError(f"`{path}` does not hold a JSON object.")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one where the file does not exist."""
    return read_object(path) if path.is_file() else {}
