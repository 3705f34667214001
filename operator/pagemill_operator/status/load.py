"""The load as `status.load` shows it: in coarse steps, so that not every request causes a status write. Pure."""

from __future__ import annotations

import bisect
from datetime import datetime

from pagemill_crds.status import LoadSummary
from pagemill_protocol.report.state import EngineLoad

LEAST_SECONDS_BETWEEN_WRITES = 30.0
PERCENT_STEP = 5
REQUEST_STEPS = [0, *(step * scale for scale in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))]


def summarize(load: EngineLoad, now: str) -> LoadSummary:
    """Return the coarse load. `now` is an RFC 3339 time; an unknown share of the cache counts as 0."""
    percent = 100 * min(1.0, max(0.0, load.kv_cache_usage))
    return LoadSummary.model_validate(
        {
            "kvCacheUsagePercent": PERCENT_STEP * round(percent / PERCENT_STEP),
            "requestsRunning": coarse(load.num_requests_running),
            "requestsWaiting": coarse(load.num_requests_waiting),
            "lastUpdateTime": now,
        }
    )


def coarse(count: int) -> int:
    """Return the largest step that is not above `count`: 0, 1, 2, 5, 10, 20, 50..."""
    return REQUEST_STEPS[bisect.bisect_right(REQUEST_STEPS, max(0, count)) - 1]


def next_load(shown: LoadSummary | None, measured: LoadSummary | None) -> LoadSummary | None:
    """Return the load to show: `shown` until a step has changed and enough time has passed, or nothing is measured."""
    if measured is None or shown is None:
        return measured or shown
    return shown if _is_same(shown, measured) or _too_early(shown, measured) else measured


def remaining_s(shown: LoadSummary | None, measured: LoadSummary | None) -> float | None:
    """Return the seconds until `next_load` shows `measured`, or None if it shows it now or nothing changed."""
    if shown is None or measured is None or _is_same(shown, measured) or not _too_early(shown, measured):
        return None
    return LEAST_SECONDS_BETWEEN_WRITES - _elapsed_s(shown, measured)


def _too_early(shown: LoadSummary, measured: LoadSummary) -> bool:
    # A clock that was set back must not stop the display for ever.
    return 0 <= _elapsed_s(shown, measured) < LEAST_SECONDS_BETWEEN_WRITES


def _elapsed_s(shown: LoadSummary, measured: LoadSummary) -> float:
    if shown.last_update_time is None or measured.last_update_time is None:
        return LEAST_SECONDS_BETWEEN_WRITES
    then, now = datetime.fromisoformat(shown.last_update_time), datetime.fromisoformat(measured.last_update_time)
    return (now - then).total_seconds()


def _is_same(shown: LoadSummary, measured: LoadSummary) -> bool:
    return measured.model_copy(update={"last_update_time": shown.last_update_time}) == shown
