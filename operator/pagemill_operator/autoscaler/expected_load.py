"""The load at the time when a replica that is ordered now could serve: arrivals, and what is left of the queue.

A rise of the rate that is significant and not over is extrapolated over the cold start. Replicas are ordered for the
lower bound that chance leaves of the estimates (`lower_bound_per_s`), and kept for the estimates themselves. Requests
that wait now are served by ready and starting replicas at the rate that the step-time model predicts; those that will
be served by then are no reason for another replica. Neighbours: `targets` and `slo` compute the replicas that the load
needs, and `prediction` has the capacity of a replica.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_operator.autoscaler.memory import TREND_S, UNLEARNED_COLD_START_S, Memory, Rate
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.signals import Shape, Signals
from pagemill_protocol.load import Arrivals

LEAST_DRAIN_S = 10.0
BURST = 2.0
"""A burst is at least this many times the rate of the minute."""
BURST_SPREADS = 5.0
TREND_SPREADS = 3.5
"""Standard deviations of the number of arrivals that a burst, or a change of the rate, must exceed."""
LEAST_TREND_S = 10.0
MOST_GROWTH = 3.0
"""A rise is extrapolated to at most this many times the present rate."""
LOWER_BOUND_SPREADS = 1.645
"""Standard deviations between an estimate and its lower bound, which holds in 19 of 20 cases."""
CAPACITY_SHARE = 0.5
"""The percentile at which the capacity of a replica is predicted."""


class ExpectedLoad(msgspec.Struct, frozen=True):
    """The load at the end of the horizon, as estimates and as their lower bounds."""

    horizon_s: float
    """The time until a replica that is ordered now is ready."""
    arrivals_per_s: float
    """Arriving requests per second."""
    arrivals_lower_bound_per_s: float
    """The lower bound of `arrivals_per_s`, scaled down where few answers determine the work of a request."""
    lengths_confidence: float
    """The lower bound of the work of a request as a share of its estimate, 0 to 1."""
    num_waiting: float
    """Requests of the queue that will still wait; where the capacity is not known, those that wait now."""
    waiting_lower_bound: float
    """The lower bound of `num_waiting`."""
    capacity_per_s: float | None = None
    """Requests per second that one replica can serve; None: not known, contradicted by a long wait, or not needed."""

    @property
    def requests_per_s(self) -> float:
        """Arrivals, and the rest of the queue if it is served within another cold start."""
        return self.arrivals_per_s + self.num_waiting / max(LEAST_DRAIN_S, self.horizon_s)

    @property
    def lower_bound_per_s(self) -> float:
        """The lower bound of `requests_per_s`, for which replicas are ordered."""
        waiting = self.waiting_lower_bound / max(LEAST_DRAIN_S, self.horizon_s)
        return self.arrivals_lower_bound_per_s + self.lengths_confidence * waiting

    def replicas_to_serve(self, factor: float = 1.0) -> int | None:
        """Return the replicas that serve `factor` times the arrivals and the queue; None where not known."""
        if self.capacity_per_s is None:
            return None
        return math.ceil(factor * self.requests_per_s / self.capacity_per_s - 1e-9)


def expected_load(signals: Signals, memory: Memory) -> ExpectedLoad:
    """Estimate the load; where the arrivals are not known, they count as none."""
    fleet = signals.fleet
    horizon_s = UNLEARNED_COLD_START_S if fleet.cold_start_s is None else fleet.cold_start_s
    if fleet.asleep:
        horizon_s = 0.0  # a replica that sleeps is awake at once
    num_answers = signals.lengths.output.total
    rate, sure = _arrivals_per_s(signals, memory, horizon_s), _arrivals_lower_bound_per_s(signals, memory, horizon_s)
    lengths_confidence = _confidence(num_answers)
    waiting = float(signals.num_waiting)
    load = offered_load(signals, max(rate, 1.0), CAPACITY_SHARE) if waiting else None
    capacity = (
        None if load is None or _is_contradicted(signals, memory, horizon_s) else _capacity_per_s(load, memory.shape)
    )
    if load is None or capacity is None:
        return ExpectedLoad(horizon_s, rate, sure, lengths_confidence, waiting, waiting)
    served = capacity * (fleet.ready * horizon_s + fleet.starting * min(fleet.starting_s, horizon_s))
    # A prompt that is longer than usual counts as several requests.
    tokens = signals.engines.num_tokens_waiting + signals.queue.num_tokens
    waiting = max(waiting, tokens / max(1.0, load.computed_tokens))
    joining, sure_joining = _arrivals_per_s(signals, memory, 0.0), _joining_lower_bound_per_s(signals, memory)
    left, sure_left = (max(0.0, waiting + joined * horizon_s - served) for joined in (joining, sure_joining))
    return ExpectedLoad(horizon_s, rate, sure, lengths_confidence, left, sure_left, capacity)


def _is_contradicted(signals: Signals, memory: Memory, horizon_s: float) -> bool:
    """Whether requests have waited for a whole cold start, so that replicas may serve less than is predicted."""
    since_s = memory.waiting_since_s
    return since_s is not None and signals.at_s - since_s >= horizon_s


def offered_load(signals: Signals, rate: float, share: float) -> OfferedLoad | None:
    """Return a load of `rate` requests per second with the lengths that were seen; None before an answer has ended.

    `share` is the percentile of the long prompts, 0 to 1.
    """
    lengths = signals.lengths
    prompt, computed, output = lengths.prompt.mean(), lengths.computed.mean(), lengths.output.mean()
    high = lengths.computed.quantile(share)
    if lengths.truth != "value" or prompt is None or computed is None or output is None or high is None:
        return None
    return OfferedLoad(rate, prompt, computed, high, output)


def predictor_of(shape: Shape | None, share: float) -> Predictor | None:
    """Return the predictor for a replica; None where the engines have reported no usable step times."""
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


def _arrivals_lower_bound_per_s(signals: Signals, memory: Memory, horizon_s: float) -> float:
    """Return the lower bound of the arrivals: each number in the estimate is as low as chance allows."""
    arrivals, num_answers = signals.arrivals, signals.lengths.output.total
    if arrivals.truth != "value":
        return 0.0
    rate, window_s = arrivals.requests_per_s, arrivals.window_s
    slope, together = _slope(signals, memory, LOWER_BOUND_SPREADS), memory.dispersion(arrivals)
    if not slope:
        rate, window_s = _settled(arrivals, memory, signals.at_s)
    # Requests that arrive together determine the rate no better than one request.
    rate *= _confidence(rate * window_s / together, num_answers)
    if slope and _still_rises(arrivals, slope):
        rate = _grown(arrivals, rate, _confidence(num_answers) * slope, horizon_s)
    burst, burst_s = arrivals.burst_requests_per_s, arrivals.burst_window_s
    if not slope and not is_burst(signals, memory):
        return rate
    return max(rate, burst * _confidence(burst * burst_s / together, num_answers))


def _joining_lower_bound_per_s(signals: Signals, memory: Memory) -> float:
    """Return the rate at which requests join the queue: that of past minutes, or the lower bound of a rise or burst."""
    if signals.arrivals.truth != "value":
        return 0.0
    return max(_settled(signals.arrivals, memory, signals.at_s)[0], _arrivals_lower_bound_per_s(signals, memory, 0.0))


def _still_rises(arrivals: Arrivals, slope: float) -> bool:
    """Whether the rate of the last seconds is as far above the minute's as in a steady rise; after a step it is not."""
    between_s = (arrivals.window_s - arrivals.burst_window_s) / 2
    return arrivals.burst_requests_per_s >= arrivals.requests_per_s + slope * between_s


def _grown(arrivals: Arrivals, rate: float, slope: float, horizon_s: float) -> float:
    # The mean over a window is the rate at its middle.
    ahead_s = arrivals.window_s / 2 + horizon_s
    return min(rate * MOST_GROWTH, rate + slope * ahead_s)


def _confidence(*samples: float) -> float:
    """Return the lower bound of a product of means as a share of it, where each mean has this many samples.

    A sample's standard deviation is taken to be its mean, as for counts of requests and for lengths of answers.
    """
    if min(samples) <= 0:
        return 0.0
    return max(0.0, 1.0 - LOWER_BOUND_SPREADS * math.sqrt(sum(1.0 / each for each in samples)))


def _settled(arrivals: Arrivals, memory: Memory, now: float) -> tuple[float, float]:
    """Return the mean rate over as many past minutes as differ by chance alone, and their duration in seconds."""
    rate, window_s, step_s = arrivals.requests_per_s, arrivals.window_s, arrivals.window_s
    together = memory.dispersion(arrivals)
    for before in reversed(memory.rates):
        # Windows that overlap add nothing.
        if step_s <= 0 or now - before.at_s < window_s:
            continue
        both = (rate * window_s + before.requests_per_s * step_s) / (window_s + step_s)
        spread = math.sqrt(together * both * (1 / window_s + 1 / step_s))
        if abs(rate - before.requests_per_s) > TREND_SPREADS * spread:
            break
        rate, window_s = both, window_s + step_s
    return rate, window_s


def is_burst(signals: Signals, memory: Memory) -> bool:
    """Whether the rate of the last seconds is twice that of the minute, and significantly so."""
    arrivals = signals.arrivals
    fast, slow, window_s = arrivals.burst_requests_per_s, arrivals.requests_per_s, arrivals.burst_window_s
    if arrivals.truth != "value" or window_s <= 0 or arrivals.window_s <= window_s:
        return False
    spread = math.sqrt(memory.dispersion(arrivals) * max(slow, 1 / window_s) / window_s)
    return fast >= BURST * slow and fast - slow > BURST_SPREADS * spread


def _slope(signals: Signals, memory: Memory, less: float) -> float:
    """Return the growth of the rate in requests per second each second; 0 where none is significant.

    It is measured over half a minute, or else over the shortest longer time that shows a significant rise. `less` is
    the number of standard deviations that are subtracted from the rise.
    """
    arrivals, now = signals.arrivals, signals.at_s
    recent = [rate for rate in memory.rates if LEAST_TREND_S <= now - rate.at_s <= TREND_S]
    older = [rate for rate in reversed(memory.rates) if now - rate.at_s > TREND_S]
    together = memory.dispersion(arrivals)
    rises = (_rise(arrivals, before, now - before.at_s, less, together) for before in (*recent[:1], *older))
    return next((slope for slope in rises if slope > 0), 0.0)


def _rise(arrivals: Arrivals, before: Rate, apart_s: float, less: float, together: float) -> float:
    """Return the growth of the rate since `before` for each second; 0 where it is not significant."""
    if arrivals.window_s <= 0:
        return 0.0
    rise = arrivals.requests_per_s - before.requests_per_s
    # Overlapping windows differ only in what entered and what left; that is at least as much as the rise itself.
    differs_s = min(apart_s, arrivals.window_s)
    num_differing = max(rise * arrivals.window_s, (arrivals.requests_per_s + before.requests_per_s) * differs_s)
    spread = math.sqrt(max(0.0, together * num_differing)) / arrivals.window_s
    return (rise - less * spread) / apart_s if rise > TREND_SPREADS * spread else 0.0
