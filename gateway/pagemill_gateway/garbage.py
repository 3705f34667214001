"""When Python collects cyclic garbage in a process of the gateway.

A request makes thousands of objects and hardly any of them in cycles; what stays (modules, pods, prefixes) is large.
Collecting after every 700 new objects, the default, took an eighth of the CPU of a request.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""Before the youngest generation is collected: some dozens of requests."""
YOUNG_ROUNDS = 10
MIDDLE_ROUNDS = 10


def collect_seldom() -> None:
    """Call once everything is imported and set up: objects that exist by then are never examined again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
