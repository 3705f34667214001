"""Outcomes of requests: one record each, and the assertions of cases about all of them. No I/O; `load` fills it.

An outcome is one of

    complete     the whole answer arrived, and a greedy one equals the golden text
    wrong        a whole answer arrived, but with another text than the golden one
    refused      the server answered with an HTTP error
    unreachable  no connection, or it ended before any answer
    reported     a stream ended early with an SSE error event
    cut          a stream ended early without an error event
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["complete", "wrong", "refused", "unreachable", "reported", "cut"]
FAILED: tuple[Outcome, ...] = ("wrong", "refused", "unreachable", "reported", "cut")


@dataclass(frozen=True)
class Record:
    """One request from the first byte sent to its end."""

    outcome: Outcome
    streamed: bool
    started_s: float
    """Monotonic time in seconds."""
    seconds: float
    ttft_s: float | None
    """Time to the first streamed text; None if no text arrived or the answer was one body."""
    longest_gap_s: float = 0.0
    """The longest time between two parts of streamed text."""
    text: str = ""
    detail: str = ""
    """The error, or the golden text if `text` differs from it."""


@dataclass(frozen=True)
class Report:
    """All requests of one load."""

    records: Sequence[Record]
    seconds: float

    def with_outcome(self, *outcomes: Outcome, streamed: bool | None = None) -> list[Record]:
        return [
            record
            for record in self.records
            if record.outcome in outcomes and (streamed is None or record.streamed == streamed)
        ]

    @property
    def complete(self) -> int:
        return len(self.with_outcome("complete"))

    @property
    def failed(self) -> list[Record]:
        return self.with_outcome(*FAILED)

    def between(self, start_s: float, end_s: float) -> Report:
        """Return the requests that were started between two monotonic times."""
        return Report([record for record in self.records if start_s <= record.started_s < end_s], end_s - start_s)

    def ttft_ms(self, percentile: float) -> float | None:
        times = sorted(record.ttft_s for record in self.records if record.ttft_s is not None)
        if not times:
            return None
        return round(times[min(len(times) - 1, int(len(times) * percentile / 100))] * 1000, 1)

    def summary(self) -> str:
        counts = Counter(str(record.outcome) for record in self.records)
        ttft_ms = {f"p{percentile}": self.ttft_ms(percentile) for percentile in (50, 95, 99)}
        numbers = {"requests": len(self.records), "seconds": round(self.seconds, 1)}
        return json.dumps({**numbers, **counts, "ttft_ms": ttft_ms})

    def assert_all_complete(self, at_least: int) -> None:
        """Check that no request failed, and that there were enough of them to be meaningful."""
        assert self.failed == [], f"{self.summary()}\n" + "\n".join(map(str, self.failed[:5]))
        assert self.complete >= at_least, f"too few requests for a meaningful result: {self.summary()}"
