"""What the default policy remembers of earlier decisions: a value, made anew by each decision."""

from __future__ import annotations

import msgspec

from pagemill_operator.autoscaler.behavior import LONGEST_WINDOW_S, History
from pagemill_operator.autoscaler.dispersion import dispersion
from pagemill_operator.autoscaler.settings import DEFAULT_IDLE_S, ScalingSettings
from pagemill_operator.autoscaler.signals import Shape, Signals, shape_of
from pagemill_protocol.load import Arrivals

DECAY_WINDOWS = 4.0
"""Down windows without a flap after which the count of flaps goes down by one."""
MAX_FLAPS = 3
IDLE_STARTS = 2.0
"""Idle for as long as so many starts, a replica has cost what a start in vain would, and what came late for it."""
LEAST_IDLE_S = 60.0
TREND_S, LONGEST_TREND_S = 30.0, 300.0
"""Between the two rates that a trend is read from: a steep rise shows at once, a gentle one only after a while."""
TREND_STEP_S = 15.0
"""Between two rates that are kept for longer."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    requests_per_s: float


class Memory(msgspec.Struct, frozen=True):
    history: History = History()
    ample: History = History()
    """Of the replicas that half as much load again would have had use for."""
    rates: tuple[Rate, ...] = ()
    """Arrival rates over the last minute: all reported in the past half minute, and some of the past minutes."""
    counts: tuple[Rate, ...] = ()
    """Arrival rates over the last seconds, apart by as many, of the past minutes."""
    waiting_since_s: float | None = None
    """Requests have waited without a pause since then; None: none waits."""
    shape: Shape | None = None
    panic_until_s: float | None = None
    removed_at_s: float | None = None
    """When replicas were removed last that have not been needed again; None: none lately."""
    flaps: int = 0
    """How often, lately, replicas were removed that were needed again soon."""
    flapped_at_s: float | None = None
    """When the count of flaps changed last."""
    emptied_at_s: float | None = None
    """When the last replica was removed last."""
    returns: int = 0
    """How often, lately, a request came soon after that."""

    def at(self, now: float) -> Memory:
        """Itself, or what of it is still true after a gap."""
        if self.history.at(now) is self.history:
            return self
        return Memory(self.history.at(now), self.ample.at(now), shape=self.shape)

    def with_rate(self, signals: Signals) -> Memory:
        """With the present rate of arrivals, if it is known."""
        arrivals, now = signals.arrivals, signals.at_s
        if arrivals.truth != "value":
            return msgspec.structs.replace(self, rates=(), counts=())
        kept: list[Rate] = []
        for rate in self.rates:
            age_s = now - rate.at_s
            if age_s <= TREND_S or (age_s <= LONGEST_TREND_S and _is_next(kept, rate)):
                kept.append(rate)
        memory = msgspec.structs.replace(self, rates=(*kept, Rate(now, arrivals.requests_per_s)))
        return memory._with_count(now, arrivals)

    def _with_count(self, now: float, arrivals: Arrivals) -> Memory:
        apart_s = arrivals.burst_window_s
        if apart_s <= 0 or (self.counts and now - self.counts[-1].at_s < apart_s):
            return self
        kept = [each for each in self.counts if now - each.at_s <= LONGEST_TREND_S]
        return msgspec.structs.replace(self, counts=(*kept, Rate(now, arrivals.burst_requests_per_s)))

    def dispersion(self, arrivals: Arrivals) -> float:
        """The variance of the number of arrivals by its mean, as far as it is no chance."""
        return dispersion([each.requests_per_s * arrivals.burst_window_s for each in self.counts])

    def with_waiting(self, signals: Signals) -> Memory:
        """With whether requests wait now."""
        if not signals.num_waiting:
            return msgspec.structs.replace(self, waiting_since_s=None)
        return self if self.waiting_since_s is not None else msgspec.structs.replace(self, waiting_since_s=signals.at_s)

    def with_shape(self, signals: Signals) -> Memory:
        """With the capacity of a replica, if the engines report it."""
        return msgspec.structs.replace(self, shape=shape_of(signals.engines) or self.shape)

    def demanded(self, now: float, replicas: int, ample: int, settings: ScalingSettings) -> Memory:
        keep_s = max(settings.up.window_s, self.down_window_s(settings))
        return msgspec.structs.replace(
            self, history=self.history.demanded(now, replicas, keep_s), ample=self.ample.demanded(now, ample, keep_s)
        )

    def idle_window_s(self, settings: ScalingSettings, cold_start_s: float | None) -> float:
        """For replicas that half as much load again would leave idle: what two starts take, where none is set."""
        window_s = self.down_window_s(settings)
        if settings.down.is_own_window or cold_start_s is None:
            return window_s
        return min(window_s, max(LEAST_IDLE_S, IDLE_STARTS * cold_start_s) * 2.0**self.flaps)

    def idle_s(self, settings: ScalingSettings, cold_start_s: float | None) -> float:
        """Without a request, until the last replica goes: what two starts take, and longer where requests came soon
        after it had gone."""
        if not settings.learns_idle_s or cold_start_s is None:
            return settings.idle_s
        return min(DEFAULT_IDLE_S, max(LEAST_IDLE_S, IDLE_STARTS * cold_start_s) * 2.0**self.returns)

    def down_window_s(self, settings: ScalingSettings) -> float:
        """Doubled by each flap, unless the resource sets it."""
        if settings.down.is_own_window:
            return settings.down.window_s
        return min(LONGEST_WINDOW_S, settings.down.window_s * 2.0**self.flaps)

    def changed(self, now: float, before: int, after: int, settings: ScalingSettings) -> Memory:
        """Replicas were added or removed. One removal that was needed again is one flap, in however many steps.

        To zero and back is none: when the last one goes is for `scaleToZeroAfter` to say.
        """
        history = self.history.changed(now, after - before)
        if not after:
            return msgspec.structs.replace(self, history=history, removed_at_s=None, emptied_at_s=now)
        if after < before:
            return msgspec.structs.replace(self, history=history, removed_at_s=now)
        if not before:
            return msgspec.structs.replace(self, history=history, returns=self._returns(now))
        removed_at_s = self.removed_at_s
        if removed_at_s is None or now - removed_at_s > 2 * self.down_window_s(settings):
            return msgspec.structs.replace(self, history=history)
        flaps = min(MAX_FLAPS, self.flaps + 1)
        return msgspec.structs.replace(self, history=history, removed_at_s=None, flaps=flaps, flapped_at_s=now)

    def _returns(self, now: float) -> int:
        """A request comes, and no replica is there."""
        if self.emptied_at_s is None or now - self.emptied_at_s > DEFAULT_IDLE_S:
            return max(0, self.returns - 1)
        return min(MAX_FLAPS, self.returns + 1)

    def decayed(self, now: float, settings: ScalingSettings) -> Memory:
        """With one flap less after a long time without any."""
        if not self.flaps or self.flapped_at_s is None:
            return self
        if now - self.flapped_at_s < DECAY_WINDOWS * self.down_window_s(settings):
            return self
        return msgspec.structs.replace(self, flaps=self.flaps - 1, flapped_at_s=now)


def _is_next(kept: list[Rate], rate: Rate) -> bool:
    return not kept or rate.at_s - kept[-1].at_s >= TREND_STEP_S
