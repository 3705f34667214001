"""Ids that distinguish requests and are not secret: 128 random bits in hex.

Drawn in the process from a generator that the system seeded once: a system call for each would release the
interpreter's lock, and a busy server would wait for it. Secrets are drawn with `secrets`.
"""

from __future__ import annotations

import os
import random

_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)


def new_id() -> str:
    return f"{_RANDOM.getrandbits(128):032x}"
