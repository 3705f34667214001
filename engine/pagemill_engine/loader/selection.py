"""Which files of a repository make the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import NamedTuple

from pagemill_engine.loader.errors import LoaderError
from pagemill_protocol.gguf_split import part_names
from pagemill_protocol.sources import HUB_PATTERNS, HubModel

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_LAYOUT = "consolidated*.safetensors"
"""The same weights once more, in the layout of another program."""


class RemoteFile(NamedTuple):
    path: str
    num_bytes: int
    sha256: str | None
    """Digest of the content; `None` if the hub does not publish it."""
    git_sha1: str | None = None
    """Git's digest of the content, for files that are stored in git itself."""


def select_files(model: HubModel, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files to load. Raises `LoaderError` when they do not make a model."""
    if model.file is not None:
        by_path = {file.path: file for file in files}
        for part in part_names(model.file):
            if part not in by_path:
                raise LoaderError("ModelNotFound", f"{_name(model)} has no file `{part}`. {_listing(files)}")
        return _safe([by_path[part] for part in part_names(model.file)])
    paths = {file.path for file in files}
    if "config.json" not in paths:
        raise LoaderError("ModelUnreadable", f"{_name(model)} has no `config.json`. {_listing(files)}")
    wanted = [file for file in files if _belongs(file.path)]
    if ONE_FILE in paths or INDEX in paths:
        wanted = [file for file in wanted if not fnmatch(file.path, OTHER_LAYOUT)]
    return _safe(wanted)


def _belongs(path: str) -> bool:
    return "/" not in path and any(fnmatch(path, pattern) for pattern in HUB_PATTERNS)


def _safe(files: list[RemoteFile]) -> list[RemoteFile]:
    """A hub must not be able to write elsewhere."""
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise LoaderError("ModelUnreadable", f"the hub names the file `{file.path}`, which is outside the model")
    return files


def _listing(files: Sequence[RemoteFile]) -> str:
    names = sorted(file.path for file in files if file.path.endswith(".gguf"))
    if not names:
        return "Use a repository with safetensors weights and a config.json, or one with GGUF files."
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"Name one of its GGUF files behind a slash: {', '.join(names[:10])}{more}."


def _name(model: HubModel) -> str:
    revision = f" at revision `{model.revision}`" if model.revision else ""
    return f"The repository `{model.repository}`{revision}"
