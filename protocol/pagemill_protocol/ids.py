"""Ids that tell requests apart and are no secrets: 128 random bits in hex.

Drawn in the process from a generator that the system seeded once: asking the system for each lets go of the
interpreter's lock, for which a busy server then waits. What must not be guessed is drawn with `secrets`.
"""

from __future__ import annotations

import os
import random

_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)


def new_id() -> str:
    return f"{_RANDOM.getrandbits(128):032x}"
