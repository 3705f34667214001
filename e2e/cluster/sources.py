"""A digest of all sources of the images: images of unchanged sources are not built again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

LIBS = ("libs/protocol", "libs/models", "libs/api", "libs/servers", "libs/kube", "libs/routing")
PACKAGES = ("crds", *LIBS, "kernels", "execution", "engine", "gateway", "operator")
FILES = (".dockerignore", "Dockerfile", "pyproject.toml", "uv.lock", "release/uv.txt")
CODE = {".py", ".cpp", ".h", ".hpp", ".toml", ".json", ".yaml", ".jinja"}


def digest(root: Path) -> str:
    """Return ten hexadecimal digits of the files' names and contents."""
    found = hashlib.blake2b(digest_size=5)
    for path in _files(root):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    yield from (root / name for name in FILES)
    yield from sorted([*root.glob("*/pyproject.toml"), *root.glob("libs/*/pyproject.toml")])
    for package in PACKAGES:
        yield from sorted(each for each in (root / package).rglob("*") if each.is_file() and each.suffix in CODE)
