"""The memory of the default policy: a value that each decision makes anew from the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pagemill_operator.autoscaler.behavior import LONGEST_WINDOW_S, History
from pagemill_operator.autoscaler.settings import DEFAULT_IDLE_S, ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.load import Arrivals
from pagemill_protocol.report.shape import Shape, shape_of

DECAY_WINDOWS = 4.0
"""The count of flaps is lowered by one after this many stabilization windows without a flap."""
MAX_FLAPS = 3
DOWN_STARTS, LEAST_DOWN_S = 3.0, 30.0
"""The window of removals is the duration of so many starts and at least so many seconds: a removal that was too early
costs a start."""
FLAP_WINDOWS = 4.0
"""A removal is taken back if replicas are needed again within this many windows."""
IDLE_STARTS = 1.0
"""A replica is kept idle for this many starts: by then it has cost as much as a start."""
LEAST_IDLE_S = 20.0
UNLEARNED_COLD_START_S = 60.0
"""The duration of a start that is assumed until one was seen."""
LONGEST_TREND_S = 180.0
"""The time over which the trend of the arrivals is found."""
LEAST_PAIRS = 5
"""The fewest pairs of windows from which a dispersion is computed."""
PAIRS_PER_STEP = 20
CHANCE_SPREADS = 1.645
"""Standard deviations that independent arrivals exceed in one of 20 cases."""


def assumed_start_s(cold_start_s: float | None) -> float:
    """Return the usual duration of a start, or what is assumed until one was seen."""
    return UNLEARNED_COLD_START_S if cold_start_s is None else cold_start_s


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """A rate of arrivals at one time."""

    at_s: float
    requests_per_s: float


class Memory(msgspec.Struct, frozen=True):
    """The memory of one deployment. Times are readings of the clock of `Signals.at_s`."""

    history: History = History()
    """Earlier demands of the present arrivals, without an expected rise, and changes."""
    expected: History = History()
    """Earlier demands of the expected load."""
    ample: History = History()
    """Earlier demands of 1.5 times the load."""
    counts: tuple[Rate, ...] = ()
    """Arrival rates of the past minutes, each over the burst window; the windows do not overlap."""
    waiting_since_s: float | None = None
    """Since when requests have waited without a pause while a replica served; None: none wait, or none serves."""
    shape: Shape | None = None
    """The capacity of one replica, as last reported."""
    panic_until_s: float | None = None
    """The time until which nothing is removed after a burst."""
    removed_at_s: float | None = None
    """The time of the latest removal that was not taken back; None: there was none lately."""
    flaps: int = 0
    """The number of recent removals after which replicas were soon needed again."""
    flapped_at_s: float | None = None
    """The time at which `flaps` changed last."""
    emptied_at_s: float | None = None
    """The time at which the last replica was removed."""
    quick_returns: int = 0
    """The number of recent removals of the last replica after which a request soon came."""

    def at(self, now: float) -> Memory:
        """Return this memory, or the part of it that is still valid after a gap."""
        if self.history.at(now) is self.history:
            return self
        return Memory(self.history.at(now), self.expected.at(now), self.ample.at(now), shape=self.shape)

    def with_count(self, signals: Signals) -> Memory:
        """Return the memory with the latest count of arrivals, or without any where they are not known."""
        arrivals, now = signals.arrivals, signals.at_s
        if arrivals.truth != "value":
            return msgspec.structs.replace(self, counts=())
        apart_s = arrivals.burst_window_s
        if apart_s <= 0 or (self.counts and now - self.counts[-1].at_s < apart_s):
            return self
        kept = [each for each in self.counts if now - each.at_s <= LONGEST_TREND_S]
        return msgspec.structs.replace(self, counts=(*kept, Rate(now, arrivals.burst_requests_per_s)))

    def dispersion(self, arrivals: Arrivals) -> float:
        """Return the dispersion of the arrivals: 1 where they may be independent of each other."""
        return dispersion([each.requests_per_s * arrivals.burst_window_s for each in self.counts])

    def with_waiting(self, signals: Signals) -> Memory:
        """Return the memory with the time since which requests have waited although a replica serves."""
        if not signals.num_waiting or not signals.fleet.ready:
            return msgspec.structs.replace(self, waiting_since_s=None)
        return self if self.waiting_since_s is not None else msgspec.structs.replace(self, waiting_since_s=signals.at_s)

    def with_shape(self, signals: Signals) -> Memory:
        """Return the memory with the capacity of a replica, where the engines report it."""
        return msgspec.structs.replace(self, shape=shape_of(signals.engines) or self.shape)

    def with_demands(
        self,
        now: float,
        settled: int,
        expected: int,
        ample: int,
        settings: ScalingSettings,
        cold_start_s: float | None,
    ) -> Memory:
        """Return the memory with the demands of the present arrivals, the expected load, and 1.5 times that load."""
        keep_s = max(settings.up.window_s, self.down_window_s(settings, cold_start_s))
        return msgspec.structs.replace(
            self,
            history=self.history.with_demand(now, settled, keep_s),
            expected=self.expected.with_demand(now, expected, keep_s),
            ample=self.ample.with_demand(now, ample, keep_s),
        )

    def idle_window_s(self, settings: ScalingSettings, cold_start_s: float | None) -> float:
        """Return the window of replicas that 1.5 times the load would leave idle.

        It is the duration of a start, or the stabilization window where that is shorter or the resource sets it.
        """
        window_s = self.down_window_s(settings, cold_start_s)
        if settings.down.is_own_window:
            return window_s
        return min(window_s, max(LEAST_IDLE_S, IDLE_STARTS * assumed_start_s(cold_start_s)) * 2.0**self.flaps)

    def idle_s(self, settings: ScalingSettings, cold_start_s: float | None) -> float:
        """Return the time without a request after which the last replica is removed.

        Unless the resource sets it, this is the duration of a start, doubled for each recent removal after which a
        request came within that time.
        """
        if not settings.learns_idle_s:
            return settings.idle_s
        return min(
            DEFAULT_IDLE_S, max(LEAST_IDLE_S, IDLE_STARTS * assumed_start_s(cold_start_s)) * 2.0**self.quick_returns
        )

    def down_window_s(self, settings: ScalingSettings, cold_start_s: float | None) -> float:
        """Return the stabilization window for removals, unless the resource sets it.

        It is the duration of three starts, and doubled for each flap.
        """
        if settings.down.is_own_window:
            return settings.down.window_s
        window_s = min(settings.down.window_s, max(LEAST_DOWN_S, DOWN_STARTS * assumed_start_s(cold_start_s)))
        return min(LONGEST_WINDOW_S, window_s * 2.0**self.flaps)

    def changed(
        self, now: float, before: int, after: int, settings: ScalingSettings, cold_start_s: float | None
    ) -> Memory:
        """Return the memory after replicas were added or removed.

        A removal that is taken back counts as one flap, in however many steps. Going to zero and back is none: the
        time of that removal has its own rule (`idle_s`).
        """
        history = self.history.changed(now, after - before)
        if not after:
            return msgspec.structs.replace(self, history=history, removed_at_s=None, emptied_at_s=now)
        if after < before:
            return msgspec.structs.replace(self, history=history, removed_at_s=now)
        if not before:
            quick_returns = self._quick_returns(now, self.idle_s(settings, cold_start_s))
            return msgspec.structs.replace(self, history=history, quick_returns=quick_returns)
        removed_at_s = self.removed_at_s
        if removed_at_s is None or now - removed_at_s > FLAP_WINDOWS * self.down_window_s(settings, cold_start_s):
            return msgspec.structs.replace(self, history=history)
        flaps = min(MAX_FLAPS, self.flaps + 1)
        return msgspec.structs.replace(self, history=history, removed_at_s=None, flaps=flaps, flapped_at_s=now)

    def _quick_returns(self, now: float, idle_s: float) -> int:
        """Return the new `quick_returns` when a request finds no replica.

        The removal was too early if the request came within `idle_s` of it: keeping the last replica twice as long
        would have served the request without a start.
        """
        if self.emptied_at_s is None or now - self.emptied_at_s > idle_s:
            return max(0, self.quick_returns - 1)
        return min(MAX_FLAPS, self.quick_returns + 1)

    def decayed(self, now: float, settings: ScalingSettings, cold_start_s: float | None) -> Memory:
        """Return the memory with one flap less after a long time without a flap."""
        if not self.flaps or self.flapped_at_s is None:
            return self
        if now - self.flapped_at_s < DECAY_WINDOWS * self.down_window_s(settings, cold_start_s):
            return self
        return msgspec.structs.replace(self, flaps=self.flaps - 1, flapped_at_s=now)


def dispersion(counts: Sequence[float]) -> float:
    """Return the dispersion of the counts of consecutive windows of one length; 1 where chance may explain it.

    It is the variance of the number of requests in a window, divided by its mean: 1 for requests that arrive
    independently of each other, and larger where they arrive in clusters, as completions of code or the calls of
    agents do. Then the same number of arrivals determines the rate less precisely, a rise or a burst must be larger to
    be significant, and requests wait longer at the same rate. Neighbouring windows are compared, so a rate that changes
    slowly adds nothing; the largest of each `PAIRS_PER_STEP` differences is left out, as a step of the rate makes one.
    """
    # The difference of two independent counts has the variance of their sum.
    ratios = sorted((after - before) ** 2 / (after + before) for before, after in pairwise(counts) if after + before)
    ratios = ratios[: len(ratios) - math.ceil(len(ratios) / PAIRS_PER_STEP)]
    if len(ratios) < LEAST_PAIRS:
        return 1.0
    found = sum(ratios) / len(ratios)
    return found if found > 1.0 + CHANCE_SPREADS * math.sqrt(2.0 / len(ratios)) else 1.0
