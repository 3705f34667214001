"""Traffic with a single cause: retrieval with long prompts, a flash crowd, weeks with weekends, silent nights.

`shapes` has the curves that load tests use.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pagemill_simulator.parameters import Count, Factor, NotNegative, Positive, Sigma
from pagemill_simulator.workloads.shapes import DAY_S, Rated, Steady

WORK_BEGINS_H, WORK_ENDS_H = 8.0, 18.0
WEEKEND = 0.15
"""Share of a working day's rate."""


class Retrieval(Steady, frozen=True, kw_only=True):
    """Answers from retrieved documents: long prompts of similar length, answers of 200 tokens."""

    name: ClassVar[str] = "retrieval"
    rate: Positive = 2.0
    """Requests per second."""
    prompt_tokens: Positive = 4000.0
    prompt_sigma: Sigma = 0.4
    longest_prompt: Count = 12_000
    output_tokens: Positive = 200.0
    output_sigma: Sigma = 0.5
    longest_output: Count = 800


class FlashCrowd(Rated, frozen=True, kw_only=True):
    """Many users who arrive within half a minute and leave slowly."""

    name: ClassVar[str] = "flash-crowd"
    rate: Positive = 2.0
    """Requests per second, before and long after."""
    factor: Factor = 6.0
    """Multiple of the rate at the peak."""
    at_s: NotNegative = 240.0
    """Second at which the crowd begins to arrive."""
    rises_s: Positive = 30.0
    """Seconds until the peak."""
    halves_s: Positive = 180.0
    """Seconds in which the part above the rate halves."""
    duration_s: Positive = 1200.0
    """Seconds of offered traffic."""

    @property
    def length_s(self) -> float:
        return self.duration_s

    @property
    def most_per_s(self) -> float:
        return self.rate * self.factor

    def rate_at(self, at_s: float) -> float:
        since_s = at_s - self.at_s
        if since_s < 0:
            return self.rate
        more = self.rate * (self.factor - 1)
        if since_s < self.rises_s:
            return self.rate + more * since_s / self.rises_s
        return self.rate + more * math.exp(-math.log(2) * (since_s - self.rises_s) / self.halves_s)


class Weekly(Rated, frozen=True, kw_only=True):
    """Weeks of office hours from Sunday midnight on, so that Monday morning follows a silent weekend."""

    name: ClassVar[str] = "weekly"
    low_rate: NotNegative = 0.2
    """Requests per second at night."""
    high_rate: Positive = 8.0
    """Requests per second in the busiest hour of a working day."""
    days: Positive = 3.0
    """Number of days from Sunday on."""
    compress: Positive = 144.0
    """144 makes ten minutes of each day: the same rates, passed through faster."""

    @property
    def length_s(self) -> float:
        return self.days * DAY_S / self.compress

    @property
    def most_per_s(self) -> float:
        return max(self.low_rate, self.high_rate)

    def rate_at(self, at_s: float) -> float:
        hour = at_s * self.compress / 3600.0
        is_weekend = int(hour / 24) % 7 in (0, 6)
        busy = _office(hour % 24) * (WEEKEND if is_weekend else 1.0)
        return self.low_rate + max(0.0, self.high_rate - self.low_rate) * busy


class SilentNights(Rated, frozen=True, kw_only=True):
    """Office hours with no traffic between them."""

    name: ClassVar[str] = "silent-nights"
    high_rate: Positive = 6.0
    """Requests per second in the busiest hour."""
    days: Positive = 2.0
    """Number of days from midnight on."""
    compress: Positive = 144.0
    """Factor of time, as in `weekly`."""

    @property
    def length_s(self) -> float:
        return self.days * DAY_S / self.compress

    @property
    def most_per_s(self) -> float:
        return self.high_rate

    def rate_at(self, at_s: float) -> float:
        return self.high_rate * _office(at_s * self.compress / 3600.0 % 24)


def _office(hour: float) -> float:
    """Return 0 to 1: 0 outside office hours, and half within an hour of their beginning and end."""
    if not WORK_BEGINS_H <= hour < WORK_ENDS_H:
        return 0.0
    edge_h = min(hour - WORK_BEGINS_H, WORK_ENDS_H - hour)
    return min(1.0, edge_h / 2.0) * (0.85 + 0.15 * math.cos(2 * math.pi * (hour - 11) / 10))
