"""Rates of arrivals over time: steady, a ramp, a step, a burst, a sine, a day."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from pagemill_simulator.parameters import Factor, NotNegative, ParameterError, Positive, Share
from pagemill_simulator.workloads.generator import Shaped

DAY_S = 86_400.0


class Rated(Shaped, frozen=True, kw_only=True):
    """A rate over time; its constant traffic is `Steady`."""

    def steady(self, intensity: float, duration_s: float) -> Steady:
        lengths = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(Shaped)}
        return Steady(**lengths, rate=intensity, duration_s=duration_s)


class Steady(Rated, frozen=True, kw_only=True):
    """A constant rate."""

    name: ClassVar[str] = "steady"
    rate: Positive = 5.0
    """Requests per second."""
    duration_s: Positive = 900.0
    """Seconds of offered traffic."""

    @property
    def length_s(self) -> float:
        return self.duration_s

    @property
    def most_per_s(self) -> float:
        return self.rate

    def rate_at(self, at_s: float) -> float:
        return self.rate


class Ramp(Rated, frozen=True, kw_only=True):
    """A linear change from one rate to another."""

    name: ClassVar[str] = "ramp"
    from_rate: NotNegative = 2.0
    """Requests per second at the beginning."""
    to_rate: NotNegative = 10.0
    """Requests per second at the end."""
    before_s: NotNegative = 120.0
    """Seconds at `from_rate`."""
    over_s: NotNegative = 300.0
    """Seconds of the change; 0: at once."""
    after_s: NotNegative = 480.0
    """Seconds at `to_rate`."""

    @property
    def length_s(self) -> float:
        return self.before_s + self.over_s + self.after_s

    @property
    def most_per_s(self) -> float:
        return max(self.from_rate, self.to_rate)

    def rate_at(self, at_s: float) -> float:
        if at_s < self.before_s:
            return self.from_rate
        if at_s >= self.before_s + self.over_s:
            return self.to_rate
        return self.from_rate + (self.to_rate - self.from_rate) * (at_s - self.before_s) / self.over_s


class Step(Rated, frozen=True, kw_only=True):
    """A sudden change from one rate to another."""

    name: ClassVar[str] = "step"
    from_rate: NotNegative = 2.0
    """Requests per second at the beginning."""
    to_rate: NotNegative = 10.0
    """Requests per second at the end."""
    at_s: NotNegative = 300.0
    """Second at which the rate changes."""
    duration_s: Positive = 900.0
    """Seconds of offered traffic."""

    @property
    def length_s(self) -> float:
        return self.duration_s

    @property
    def most_per_s(self) -> float:
        return max(self.from_rate, self.to_rate)

    def rate_at(self, at_s: float) -> float:
        return self.from_rate if at_s < self.at_s else self.to_rate


class Burst(Rated, frozen=True, kw_only=True):
    """A steady rate that is multiplied for a while."""

    name: ClassVar[str] = "burst"
    rate: Positive = 2.0
    """Requests per second outside the burst."""
    factor: Factor = 10.0
    """Multiple of the rate during the burst."""
    at_s: NotNegative = 300.0
    """Second at which the burst begins."""
    for_s: Positive = 120.0
    """Seconds that the burst lasts."""
    duration_s: Positive = 1200.0
    """Seconds of offered traffic."""

    @property
    def length_s(self) -> float:
        return self.duration_s

    @property
    def most_per_s(self) -> float:
        return self.rate * self.factor

    def rate_at(self, at_s: float) -> float:
        return self.rate * self.factor if self.at_s <= at_s < self.at_s + self.for_s else self.rate


class Sine(Rated, frozen=True, kw_only=True):
    """A rate that oscillates around its mean."""

    name: ClassVar[str] = "sine"
    rate: Positive = 5.0
    """Requests per second, mean."""
    swing: Share = 0.6
    """Amplitude as a share of the mean."""
    period_s: Positive = 600.0
    """Seconds of one oscillation."""
    duration_s: Positive = 3600.0
    """Seconds of offered traffic."""

    @property
    def length_s(self) -> float:
        return self.duration_s

    @property
    def most_per_s(self) -> float:
        return self.rate * (1 + self.swing)

    def rate_at(self, at_s: float) -> float:
        return self.rate * (1 + self.swing * math.sin(2 * math.pi * at_s / self.period_s))


class Diurnal(Rated, frozen=True, kw_only=True):
    """Days from midnight on: least traffic at 4 o'clock, most at 16 o'clock."""

    name: ClassVar[str] = "diurnal"
    low_rate: NotNegative = 0.5
    """Requests per second at night."""
    high_rate: Positive = 10.0
    """Requests per second in the busiest hour."""
    days: Positive = 1.0
    """Number of days from midnight on."""
    compress: Positive = 1.0
    """24 makes an hour of each day: the same rates, passed through faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_rate > self.high_rate:
            raise ParameterError(f"low_rate: {self.low_rate:g} is above high_rate {self.high_rate:g}; swap them")

    @property
    def length_s(self) -> float:
        return self.days * DAY_S / self.compress

    @property
    def most_per_s(self) -> float:
        return max(self.low_rate, self.high_rate)

    def rate_at(self, at_s: float) -> float:
        hour = at_s * self.compress / 3600.0
        busy = (1 - math.cos(2 * math.pi * (hour - 4) / 24)) / 2
        return self.low_rate + (self.high_rate - self.low_rate) * busy
