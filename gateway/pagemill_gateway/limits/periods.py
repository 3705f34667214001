"""The calendar that budgets follow: days and months in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple


class Periods(NamedTuple):
    day: str
    """For example `20261122`."""
    month: str
    """For example `202611`."""
    day_left_s: float
    month_left_s: float


def periods_at(unix_s: float) -> Periods:
    now = datetime.fromtimestamp(unix_s, UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return Periods(
        now.strftime("%Y%m%d"),
        now.strftime("%Y%m"),
        (midnight + timedelta(days=1) - now).total_seconds(),
        (next_month - now).total_seconds(),
    )
