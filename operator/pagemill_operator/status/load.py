"""Load as `status.load` shows it: in coarse steps, so that a status is not written with every request. Pure."""

from __future__ import annotations

import bisect
from datetime import datetime

from pagemill_crds.status import LoadSummary

LEAST_SECONDS_BETWEEN_WRITES = 30.0
PERCENT_STEP = 5
REQUEST_STEPS = [0, *(step * scale for scale in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))]


def summarize(kv_cache_usage: float | None, running: int, waiting: int, now: str) -> LoadSummary:
    """`now`: RFC 3339. An unknown share of the cache counts as 0."""
    percent = 100 * min(1.0, max(0.0, kv_cache_usage or 0.0))
    return LoadSummary.model_validate(
        {
            "kvCacheUsagePercent": PERCENT_STEP * round(percent / PERCENT_STEP),
            "requestsRunning": coarse(running),
            "requestsWaiting": coarse(waiting),
            "lastUpdateTime": now,
        }
    )


def coarse(count: int) -> int:
    """The largest step that is not above `count`: 0, 1, 2, 5, 10, 20, 50..."""
    return REQUEST_STEPS[bisect.bisect_right(REQUEST_STEPS, max(0, count)) - 1]


def next_load(shown: LoadSummary | None, measured: LoadSummary | None) -> LoadSummary | None:
    """What to show: `shown` until a step has changed and its time is over. Nothing measured changes nothing."""
    if measured is None or shown is None:
        return measured or shown
    same = measured.model_copy(update={"last_update_time": shown.last_update_time}) == shown
    return shown if same or _too_early(shown.last_update_time, measured.last_update_time) else measured


def _too_early(shown_at: str | None, now: str | None) -> bool:
    if shown_at is None or now is None:
        return False
    elapsed = datetime.fromisoformat(now) - datetime.fromisoformat(shown_at)
    # A clock that was set back must not stop the display for ever.
    return 0 <= elapsed.total_seconds() < LEAST_SECONDS_BETWEEN_WRITES
