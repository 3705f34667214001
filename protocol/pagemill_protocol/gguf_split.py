"""Names of the files of a GGUF model that is split: `NAME-00001-of-00003.gguf`, as llama.cpp's programs write them.

Knows names only; `gguf_file` reads the parts.
"""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """All files of the model that `name`, with or without folders before it, is a part of; itself where it is whole."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}" for number in range(1, count + 1)]


def whole_name(name: str) -> str:
    """What the model's file would be called in one piece."""
    match = _PART.fullmatch(name)
    return name if match is None else match["stem"] + match["suffix"]
