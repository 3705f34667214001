"""When series of things that are gone may be dropped, such as those of an engine that was killed.

What happened last to a thing is the most important: a series that goes with it would never reach a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable

KEPT_S = 600.0
"""Several scrape intervals."""


class Departed:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def over(self, known: Iterable[str], present: Container[str]) -> set[str]:
        """Return those of `known` that have not been among `present` for `KEPT_S`."""
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in known if each not in present}
        return {each for each, since in self._since.items() if now - since >= KEPT_S}
