"""Open the files of a model: regular files inside its folder, or inside the content-addressed store of its folder.

The publisher of a model chooses the names in its folder and what they link to. A device or a pipe would never end, and
a link out of the folder would show the text of other files. All readers of a model's files open them here.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from pagemill_protocol.source_errors import UnreadableModelError

STORE = "blobs"
"""Folder of files by their digests in the hub's cache, to which the links of its `snapshots` lead."""
_SNAPSHOTS = "snapshots"
MODULES_FILE = "modules.json"
"""The list of modules of sentence-transformers, in the order of execution; some have weights in their own folders."""


def open_regular(path: Path, root: Path | None = None) -> int:
    """Return a descriptor of a file, which the caller closes. Raises `UnreadableModelError`.

    `root`: the model's folder, by default the one that contains the file.
    """
    check_inside(path, path.parent if root is None else root)
    try:
        # Without O_NONBLOCK, a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnreadableModelError(f"`{path}` cannot be read: {error.strerror}.") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UnreadableModelError(f"`{path}` is not a regular file. Replace it by a copy of the file.")


def check_inside(path: Path, root: Path) -> None:
    """Raise `UnreadableModelError` for a link that leads out of the model's folder `root` and of its store."""
    try:
        found = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, or a name with a zero byte
        raise UnreadableModelError(
            f"`{path}` is a link that leads nowhere. Replace it by a copy of the file."
        ) from None
    places = [root.resolve()]
    if root.absolute().parent.name == _SNAPSHOTS:
        places.append((root.absolute().parent.parent / STORE).resolve())
    if not any(found.is_relative_to(place) for place in places):
        raise UnreadableModelError(
            f"`{path}` is a link to a file outside of the model's folder. Replace it by a copy of the file."
        )


def exists(path: Path) -> bool:
    """Whether there is something of that name, also a link that leads nowhere: opening it says what is wrong."""
    return os.path.lexists(path)


def path_inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of a name that a model's file gives. Raises `UnreadableModelError` for one outside the folder.

    `where`: the file that gives it, for the message.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise UnreadableModelError(f"`{where}` names `{name[:80]}`, which is outside of the model's folder.")
    return folder / name
