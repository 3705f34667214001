"""The load when a replica that is ordered now can serve: the rate of arrivals, and what is left of the queue by then.

A rise that stands out of the noise, and is not over, is extrapolated over the cold start. What few arrivals or few
answers may show by chance is kept apart (`sure_per_s`): it orders no replica, and keeps those that are there. Requests
that wait now are served by the replicas that are there, and by those that start, as far as the step-time model says;
what is served by then is no reason for another replica. Neighbours: `targets` and `slo` ask what that needs,
`prediction` what a replica can do.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_operator.autoscaler.memory import TREND_S, Memory, Rate
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.signals import Shape, Signals
from pagemill_protocol.load import Arrivals

UNLEARNED_COLD_START_S = 60.0
LEAST_DRAIN_S = 10.0
BURST = 2.0
"""Times the rate of the minute."""
BURST_SPREADS = 5.0
TREND_SPREADS = 3.5
"""Standard deviations of arrivals, as unevenly as they come (`dispersion`), that a burst, or a rise, must exceed."""
LEAST_TREND_S = 10.0
MOST_GROWTH = 3.0
"""A rise is extrapolated to no more than this many times the present load."""
SURE_SPREADS = 1.645
"""Standard deviations below an estimate: it is as high by chance in one of 20 cases."""
CAPACITY_SHARE = 0.5
"""The percentile at which a replica's capacity is predicted: what it serves on average."""


class ExpectedLoad(msgspec.Struct, frozen=True):
    horizon_s: float
    """Until a replica that is ordered now is ready."""
    arrivals_per_s: float
    """Requests per second by then."""
    sure_arrivals_per_s: float
    """Of them, those that chance does not explain: few arrivals say little, and few answers little of their work."""
    sure_of_lengths: float
    """Share of a request's work that the number of known answers makes sure of, 0 to 1."""
    num_waiting: float
    """Requests that wait now, or come until then, and will still wait; where no capacity is known, those of now."""
    sure_waiting: float
    """The same where chance may have made a part of a rise or burst of the last seconds."""
    capacity_per_s: float | None = None
    """Requests per second that one replica can serve; None: not known, refuted, or not needed, as nothing waits."""

    @property
    def requests_per_s(self) -> float:
        """Arrivals, and what is left of the queue, worked off within another cold start."""
        return self.arrivals_per_s + self.num_waiting / max(LEAST_DRAIN_S, self.horizon_s)

    @property
    def sure_per_s(self) -> float:
        """Of `requests_per_s`, what more replicas are ordered for."""
        waiting = self.sure_waiting / max(LEAST_DRAIN_S, self.horizon_s)
        return self.sure_arrivals_per_s + self.sure_of_lengths * waiting

    def to_serve(self, factor: float = 1.0) -> int | None:
        """Replicas that serve arrivals and queue, `factor` times as many of both; None: not known."""
        if self.capacity_per_s is None:
            return None
        return math.ceil(factor * self.requests_per_s / self.capacity_per_s - 1e-9)


def expected_load(signals: Signals, memory: Memory) -> ExpectedLoad:
    """Where the arrivals are not known, none come."""
    fleet = signals.fleet
    horizon_s = UNLEARNED_COLD_START_S if fleet.cold_start_s is None else fleet.cold_start_s
    if fleet.asleep:
        horizon_s = 0.0  # one that sleeps is awake at once
    num_answers = signals.lengths.output.total
    rate, sure = _arrivals_per_s(signals, memory, horizon_s), _sure_arrivals_per_s(signals, memory, horizon_s)
    sure_of_lengths = _sure(num_answers)
    waiting = float(signals.num_waiting)
    load = offered_load(signals, max(rate, 1.0), CAPACITY_SHARE) if waiting else None
    capacity = None if load is None or _is_refuted(signals, memory, horizon_s) else _capacity_per_s(load, memory.shape)
    if load is None or capacity is None:
        return ExpectedLoad(horizon_s, rate, sure, sure_of_lengths, waiting, waiting)
    served = capacity * (fleet.ready * horizon_s + fleet.starting * min(fleet.starting_s, horizon_s))
    # Prompts that are longer than usual count for several.
    tokens = signals.engines.num_tokens_waiting + signals.queue.num_tokens
    waiting = max(waiting, tokens / max(1.0, load.computed_tokens))
    joining, sure_joining = _arrivals_per_s(signals, memory, 0.0), _sure_to_join_per_s(signals, memory)
    left, sure_left = (max(0.0, waiting + joined * horizon_s - served) for joined in (joining, sure_joining))
    return ExpectedLoad(horizon_s, rate, sure, sure_of_lengths, left, sure_left, capacity)


def _is_refuted(signals: Signals, memory: Memory, horizon_s: float) -> bool:
    """Requests have waited through a whole cold start: the replicas may serve less than is predicted."""
    since_s = memory.waiting_since_s
    return since_s is not None and signals.at_s - since_s >= horizon_s


def offered_load(signals: Signals, rate: float, share: float) -> OfferedLoad | None:
    """`rate` requests per second of the lengths that were seen; None: no answer has ended yet."""
    lengths = signals.lengths
    prompt, computed, output = lengths.prompt.mean(), lengths.computed.mean(), lengths.output.mean()
    high = lengths.computed.quantile(share)
    if lengths.truth != "value" or prompt is None or computed is None or output is None or high is None:
        return None
    return OfferedLoad(rate, prompt, computed, high, output)


def predictor_of(shape: Shape | None, share: float) -> Predictor | None:
    """None: the engines have reported no step times that can be used."""
    if shape is None:
        return None
    try:
        predictor = Predictor(shape, share)
    except ValueError:
        return None
    return predictor if predictor.known else None


def _capacity_per_s(load: OfferedLoad, shape: Shape | None) -> float | None:
    predictor = predictor_of(shape, CAPACITY_SHARE)
    if predictor is None:
        return None
    return predictor.highest_rate(load, 1, lambda found: math.isfinite(found.ttft_ms)) or None


def _arrivals_per_s(signals: Signals, memory: Memory, horizon_s: float) -> float:
    arrivals = signals.arrivals
    if arrivals.truth != "value":
        return 0.0
    rate, burst, slope = arrivals.requests_per_s, arrivals.burst_requests_per_s, _slope(signals, memory, 0.0)
    if not slope:
        rate = _settled(arrivals, memory, signals.at_s)[0]
    elif _still_rises(arrivals, slope):
        rate = _grown(arrivals, rate, slope, horizon_s)
    return max(rate, burst) if slope or is_burst(signals, memory) else rate


def _sure_arrivals_per_s(signals: Signals, memory: Memory, horizon_s: float) -> float:
    """What is left of the same when each number in it is as low as chance lets it be."""
    arrivals, num_answers = signals.arrivals, signals.lengths.output.total
    if arrivals.truth != "value":
        return 0.0
    rate, window_s = arrivals.requests_per_s, arrivals.window_s
    slope, together = _slope(signals, memory, SURE_SPREADS), memory.dispersion(arrivals)
    if not slope:
        rate, window_s = _settled(arrivals, memory, signals.at_s)
    # Requests that come together say as much as one.
    rate *= _sure(rate * window_s / together, num_answers)
    if slope and _still_rises(arrivals, slope):
        rate = _grown(arrivals, rate, _sure(num_answers) * slope, horizon_s)
    burst, burst_s = arrivals.burst_requests_per_s, arrivals.burst_window_s
    if not slope and not is_burst(signals, memory):
        return rate
    return max(rate, burst * _sure(burst * burst_s / together, num_answers))


def _sure_to_join_per_s(signals: Signals, memory: Memory) -> float:
    """By the past minutes, or by as much of a rise or burst as is no chance."""
    if signals.arrivals.truth != "value":
        return 0.0
    return max(_settled(signals.arrivals, memory, signals.at_s)[0], _sure_arrivals_per_s(signals, memory, 0.0))


def _still_rises(arrivals: Arrivals, slope: float) -> bool:
    """The last seconds are as far above the minute as a steady rise puts them: it was no step that is over."""
    between_s = (arrivals.window_s - arrivals.burst_window_s) / 2
    return arrivals.burst_requests_per_s >= arrivals.requests_per_s + slope * between_s


def _grown(arrivals: Arrivals, rate: float, slope: float, horizon_s: float) -> float:
    # The average over a window is that of its middle.
    ahead_s = arrivals.window_s / 2 + horizon_s
    return min(rate * MOST_GROWTH, rate + slope * ahead_s)


def _sure(*samples: float) -> float:
    """The share of a product of means that is no chance. Of counts; lengths spread about as much as their mean."""
    if min(samples) <= 0:
        return 0.0
    return max(0.0, 1.0 - SURE_SPREADS * math.sqrt(sum(1.0 / each for each in samples)))


def _settled(arrivals: Arrivals, memory: Memory, now: float) -> tuple[float, float]:
    """The rate over as many of the past minutes as differ by chance alone, and how many seconds those are."""
    rate, window_s, step_s = arrivals.requests_per_s, arrivals.window_s, arrivals.window_s
    together = memory.dispersion(arrivals)
    for before in reversed(memory.rates):
        # Windows that overlap say nothing new.
        if step_s <= 0 or now - before.at_s < window_s:
            continue
        both = (rate * window_s + before.requests_per_s * step_s) / (window_s + step_s)
        spread = math.sqrt(together * both * (1 / window_s + 1 / step_s))
        if abs(rate - before.requests_per_s) > SURE_SPREADS * spread:
            break
        rate, window_s = both, window_s + step_s
    return rate, window_s


def is_burst(signals: Signals, memory: Memory) -> bool:
    """The last seconds have brought twice as much as the minute, and that is no chance."""
    arrivals = signals.arrivals
    fast, slow, window_s = arrivals.burst_requests_per_s, arrivals.requests_per_s, arrivals.burst_window_s
    if arrivals.truth != "value" or window_s <= 0 or arrivals.window_s <= window_s:
        return False
    spread = math.sqrt(memory.dispersion(arrivals) * max(slow, 1 / window_s) / window_s)
    return fast >= BURST * slow and fast - slow > BURST_SPREADS * spread


def _slope(signals: Signals, memory: Memory, less: float) -> float:
    """Requests per second more with each second, as far as a rise stands out of the noise; never negative.

    The latest rise that does: over half a minute, else over the shortest of the past minutes that shows one. `less`:
    standard deviations that are taken off it.
    """
    arrivals, now = signals.arrivals, signals.at_s
    recent = [rate for rate in memory.rates if LEAST_TREND_S <= now - rate.at_s <= TREND_S]
    older = [rate for rate in reversed(memory.rates) if now - rate.at_s > TREND_S]
    together = memory.dispersion(arrivals)
    rises = (_rise(arrivals, before, now - before.at_s, less, together) for before in (*recent[:1], *older))
    return next((slope for slope in rises if slope > 0), 0.0)


def _rise(arrivals: Arrivals, before: Rate, apart_s: float, less: float, together: float) -> float:
    """Since that rate, for each second; 0 where chance may have made it."""
    if arrivals.window_s <= 0:
        return 0.0
    rise = arrivals.requests_per_s - before.requests_per_s
    # Where the two windows overlap, only what entered and what left them differs: that is no less than the rise.
    differs_s = min(apart_s, arrivals.window_s)
    num_differing = max(rise * arrivals.window_s, (arrivals.requests_per_s + before.requests_per_s) * differs_s)
    spread = math.sqrt(max(0.0, together * num_differing)) / arrivals.window_s
    return (rise - less * spread) / apart_s if rise > TREND_SPREADS * spread else 0.0
