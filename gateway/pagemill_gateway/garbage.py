"""When Python looks for cyclic garbage in a process of the gateway.

A request makes thousands of objects and next to none of them in cycles; what stays (modules, pods, prefixes) is large.
Looking after every 700 new objects, as is the default, took an eighth of the CPU of a request.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""Before the youngest are looked through: some dozens of requests."""
YOUNG_ROUNDS = 10
MIDDLE_ROUNDS = 10


def collect_seldom() -> None:
    """Call once all is imported and set up: what lives by then is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
