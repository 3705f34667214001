"""The calendar of budgets: days and months in UTC."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple


class Periods(NamedTuple):
    day: str
    """For example `20261122`."""
    month: str
    """For example `202611`."""
    day_left_s: float
    month_left_s: float


class Calendar:
    """Returns the current periods. Dates are computed once a day, because every request needs them."""

    def __init__(self, now_unix_s: Callable[[], float]) -> None:
        self._now_unix_s = now_unix_s
        self._day = self._month = ""
        self._day_begins_s = self._day_ends_s = self._month_ends_s = 0.0

    def now(self) -> Periods:
        unix_s = self._now_unix_s()
        if not self._day_begins_s <= unix_s < self._day_ends_s:
            self._enter_day(unix_s)
        # Rounded to microseconds: further digits of a difference of two large floats are noise.
        day_left_s, month_left_s = round(self._day_ends_s - unix_s, 6), round(self._month_ends_s - unix_s, 6)
        return Periods(self._day, self._month, day_left_s, month_left_s)

    def _enter_day(self, unix_s: float) -> None:
        midnight = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
        self._day, self._month = midnight.strftime("%Y%m%d"), midnight.strftime("%Y%m")
        self._day_begins_s = midnight.timestamp()
        self._day_ends_s = (midnight + timedelta(days=1)).timestamp()
        self._month_ends_s = next_month.timestamp()
