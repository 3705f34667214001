"""Traffic as single causes make it: retrieval with long prompts, a flash crowd, weeks with weekends, silent nights.

Neighbour: `shapes`, the curves of which load tests are made.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pagemill_simulator.parameters import Count, Factor, NotNegative, Positive, Sigma
from pagemill_simulator.workloads.shapes import DAY_S, Rated, Steady

WORK_BEGINS_H, WORK_ENDS_H = 8.0, 18.0
WEEKEND = 0.15
"""Of a working day's rate."""


class Retrieval(Steady, frozen=True, kw_only=True):
    """Answers from documents that were found: long prompts of much the same length, answers of 200 tokens."""

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
    """Many who come within half a minute and lose interest slowly."""

    name: ClassVar[str] = "flash-crowd"
    rate: Positive = 2.0
    """Requests per second, before and long after."""
    factor: Factor = 6.0
    """Times the rate, at the height."""
    at_s: NotNegative = 240.0
    """When it begins."""
    rises_s: Positive = 30.0
    """Until the height."""
    halves_s: Positive = 180.0
    """In which what is above the rate halves."""
    duration_s: Positive = 1200.0
    """How long traffic is offered."""

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
    """Weeks of office hours, from Sunday's midnight on: Monday morning comes after a silent weekend."""

    name: ClassVar[str] = "weekly"
    low_rate: NotNegative = 0.2
    """Requests per second at night."""
    high_rate: Positive = 8.0
    """Requests per second in the busiest hour of a working day."""
    days: Positive = 3.0
    """How many, from Sunday on."""
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
    """Office hours with nothing at all between them."""

    name: ClassVar[str] = "silent-nights"
    high_rate: Positive = 6.0
    """Requests per second in the busiest hour."""
    days: Positive = 2.0
    """How many, from midnight on."""
    compress: Positive = 144.0
    """As `weekly`."""

    @property
    def length_s(self) -> float:
        return self.days * DAY_S / self.compress

    @property
    def most_per_s(self) -> float:
        return self.high_rate

    def rate_at(self, at_s: float) -> float:
        return self.high_rate * _office(at_s * self.compress / 3600.0 % 24)


def _office(hour: float) -> float:
    """From 0 to 1: nothing outside of office hours, half of all within an hour of their beginning and end."""
    if not WORK_BEGINS_H <= hour < WORK_ENDS_H:
        return 0.0
    edge_h = min(hour - WORK_BEGINS_H, WORK_ENDS_H - hour)
    return min(1.0, edge_h / 2.0) * (0.85 + 0.15 * math.cos(2 * math.pi * (hour - 11) / 10))
