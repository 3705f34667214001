"""A cause of failure, and how messages of other programs are shortened for a condition."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_QUOTE_CHARS = 400


class Cause(NamedTuple):
    reason: str
    message: str


def quote(text: str) -> str:
    """A message of another program as one bounded line."""
    line = " ".join(text.split()).rstrip(".; ")
    return line if len(line) <= MAX_QUOTE_CHARS else line[: MAX_QUOTE_CHARS - 3] + "..."


def without_object_name(message: str) -> str:
    """`pods "chat-engine-5d59d67564-x7k2p" is forbidden: exceeded quota` -> `exceeded quota`: names are random."""
    message = re.sub(r'^[\w./-]+ "[^"]*" (is forbidden|is invalid): ', "", message)
    return re.sub(r"^failed to (create|convert) .*?: (?=\.|unable)", "", message)
