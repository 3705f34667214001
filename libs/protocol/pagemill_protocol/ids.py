"""Ids that distinguish requests and are not secret: 128 random bits in hex.

They come from a generator that the system seeded once: a system call per id would release the interpreter's lock, and a
busy server would wait to get it back. Secrets come from the module `secrets`.
"""

from __future__ import annotations

import os
import random

_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)


def new_id() -> str:
    return f"{_RANDOM.getrandbits(128):032x}"
