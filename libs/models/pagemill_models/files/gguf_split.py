"""Names of the files of a split GGUF model: `NAME-00001-of-00003.gguf`, as llama.cpp's programs write them.

This module knows only names; `gguf_file` reads the parts.
"""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model of which `name` is a part; `[name]` where the model is one file.

    `name` may have folders before it.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}" for number in range(1, count + 1)]


def unsplit_name(name: str) -> str:
    """Return the name that the model's file would have in one piece."""
    match = _PART.fullmatch(name)
    return name if match is None else match["stem"] + match["suffix"]
