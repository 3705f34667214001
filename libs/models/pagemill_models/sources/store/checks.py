"""Check a file once it has arrived: whether an engine could read it, before the other files are fetched.

A truncated upload arrives complete, and its digest, if any, matches. Without these checks a volume would keep it, and
every engine would fail on it. Engines check the rest: which weights exist, and their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagemill_models.declaration.config_values import AUTO_GPTQ_FILE, CONFIG_FILE
from pagemill_models.files.gguf_file import check_gguf
from pagemill_models.files.json_file import read_object
from pagemill_models.files.safetensors_header import read_header
from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.selection import INDEX
from pagemill_models.spec.heads import check_stored_config
from pagemill_protocol.source_errors import FetchError, SourceError

HEADS = (CONFIG_FILE, AUTO_GPTQ_FILE, INDEX)
"""Files that describe the others, fetched first."""
_UPLOAD = "The file is invalid at the source: upload the file again."
_COMPLETE: dict[str, Callable[[Path], object]] = {
    ".safetensors": read_header,
    ".gguf": check_gguf,
    "tokenizer.json": read_object,
    "tokenizer_config.json": read_object,
    "special_tokens_map.json": read_object,
    "generation_config.json": read_object,
}
"""Check of a file by the suffix of its name."""


def check_heads(folder: Path, names: set[str], source: str) -> None:
    """Refuse a model that no engine would load or that lacks files. Raises `FetchError`."""
    if CONFIG_FILE in names:
        _check_config(folder)
    if INDEX in names:
        _check_index(folder / INDEX, names, source)


def check_complete(path: Path, name: str, source: str) -> None:
    """Check a complete file. Raises `FetchError` and removes an invalid file, so that the next run fetches it again."""
    check = next((check for ending, check in _COMPLETE.items() if name.endswith(ending)), None)
    try:
        if check is not None:
            check(path)
    except SourceError as error:
        raise _unreadable(path, name, source, error) from error


def check_started(path: Path, file: RemoteFile, source: str) -> None:
    """Check a weight file of which only the header has arrived, as `check_complete`."""
    try:
        read_header(path, file.num_bytes)
    except SourceError as error:
        raise _unreadable(path, file.path, source, error) from error


def _unreadable(path: Path, name: str, source: str, error: SourceError) -> FetchError:
    message = error.message.replace(f"`{path}`", f"{source}: `{name}`")
    path.unlink()
    return FetchError("ModelUnreadable", f"{message} {_UPLOAD}")


def _check_config(folder: Path) -> None:
    try:
        check_stored_config(folder)
    except SourceError as error:
        message = error.message.replace(str(folder / CONFIG_FILE), CONFIG_FILE).replace(f"`{folder}`", "The model")
        (folder / CONFIG_FILE).unlink()
        raise FetchError(error.reason, message) from error


def _check_index(path: Path, names: set[str], source: str) -> None:
    """Check that all files of the index can be fetched."""
    try:
        shards = set(map(str, read_object(path)["weight_map"].values()))
    except (SourceError, KeyError, AttributeError, TypeError):
        path.unlink()
        raise FetchError("ModelUnreadable", f"{source}: `{INDEX}` has no `weight_map`. Publish it again.") from None
    if absent := sorted(shards - names):
        message = f"{source} lacks {', '.join(absent[:5])}, which `{INDEX}` names. Upload all files of the model."
        raise FetchError("ModelUnreadable", message)
