"""A cause of failure, and functions that shorten other programs' messages for a condition."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_QUOTE_CHARS = 400


class Cause(NamedTuple):
    reason: str
    message: str


def quote(text: str) -> str:
    """Return another program's message as one line of at most `MAX_QUOTE_CHARS` characters."""
    line = " ".join(text.split()).rstrip(".; ")
    return line if len(line) <= MAX_QUOTE_CHARS else line[: MAX_QUOTE_CHARS - 3] + "..."


def without_object_name(message: str) -> str:
    """Remove the object's name, which is random.

    `pods "chat-engine-5d59d67564-x7k2p" is forbidden: exceeded quota` becomes `exceeded quota`.
    """
    message = re.sub(r'^[\w./-]+ "[^"]*" (is forbidden|is invalid): ', "", message)
    return re.sub(r"^failed to (create|convert) .*?: (?=\.|unable)", "", message)
