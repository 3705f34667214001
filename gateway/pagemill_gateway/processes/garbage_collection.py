"""Tunes Python's garbage collector for the processes of the gateway.

A request creates thousands of objects, of which hardly any are in cycles, and the long-lived objects (modules, pods,
prefixes) are many. With the default, a collection every 700 new objects took an eighth of a request's CPU time.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""The number of new objects that starts a collection of the youngest generation: some dozens of requests."""
YOUNG_ROUNDS = 10
MIDDLE_ROUNDS = 10


def reduce_garbage_collection() -> None:
    """Exclude all current objects from collection, and collect rarely. Call it when everything is set up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
