"""The load at the time when a replica that is ordered now could serve: arrivals, and what is left of the queue.

A significant rise of the rate (`arrival_trend`) is extrapolated over the start of a replica, the less the younger it
is. Replicas are ordered for the lower bound that few arrivals and few answers leave of the load, and kept for its upper
bound.
Requests that wait now are served by ready and starting replicas at the rate that the step-time model predicts; those
that will be served by then are no reason for another replica. Neighbours: `targets` and `slo` compute the replicas that
the load needs, and `prediction` has the capacity of a replica.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill_operator.autoscaler.arrival_trend import trend
from pagemill_operator.autoscaler.memory import Memory, assumed_start_s
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape

LEAST_DRAIN_S = 10.0
BURST = 2.0
"""A burst is at least this many times the rate of the minute."""
BURST_SPREADS = 5.0
MOST_GROWTH = 3.0
"""A rise is extrapolated to at most this many times the present rate."""
FEW_SAMPLES = 30
"""A mean of fewer arrivals or answers counts by its lower bound."""
LOWER_BOUND_SPREADS, UPPER_BOUND_SPREADS = 1.645, 1.0
"""Standard deviations between an estimate and its bounds, which hold in 19 of 20 and in 5 of 6 cases."""
CAPACITY_SHARE = 0.5
"""The percentile at which the capacity of a replica is predicted."""

MOST_VARIATION = 1.0
"""The most that the variation of the prompts' lengths counts: a long prompt is computed in chunks, beside others."""


class ExpectedLoad(msgspec.Struct, frozen=True):
    """The load at the end of the horizon."""

    horizon_s: float
    """The time until a replica that is ordered now is ready."""
    arrivals_per_s: float
    """Arriving requests per second."""
    arrivals_now_per_s: float
    """Arriving requests per second at present, without an expected rise."""
    arrivals_lower_bound_per_s: float
    """The arrivals, scaled down where few arrivals or few answers determine the load."""
    lengths_confidence: float
    """The lower bound of the work of a request as a share of its estimate, 0 to 1."""
    upper_bound: float
    """The upper bound that chance leaves of the load, as a multiple of its estimate."""
    num_waiting: float
    """Requests of the queue that will still wait; where the capacity is not known, those that wait now."""
    capacity_per_s: float | None = None
    """Requests per second that one replica can serve; None: not known, contradicted by a long wait, or not needed."""
    predictor: Predictor | None = None
    """The predictor at `CAPACITY_SHARE`; None where the engines have reported no usable step times."""

    @property
    def requests_per_s(self) -> float:
        """Arrivals, and the rest of the queue if it is served within another cold start."""
        return self.arrivals_per_s + self._drained_per_s

    @property
    def settled_per_s(self) -> float:
        """`requests_per_s` at the present rate of arrivals."""
        return min(self.arrivals_now_per_s, self.arrivals_per_s) + self._drained_per_s

    @property
    def _drained_per_s(self) -> float:
        return self.num_waiting / max(LEAST_DRAIN_S, self.horizon_s)

    def replicas_to_serve(self, factor: float = 1.0) -> int | None:
        """Return the replicas that serve `factor` times the arrivals and the queue; None where not known."""
        if self.capacity_per_s is None:
            return None
        return math.ceil(factor * self.requests_per_s / self.capacity_per_s - 1e-9)


def expected_load(signals: Signals, memory: Memory) -> ExpectedLoad:
    """Estimate the load; where the arrivals are not known, they count as none."""
    fleet = signals.fleet
    horizon_s = assumed_start_s(fleet.cold_start_s)
    if fleet.asleep:
        horizon_s = 0.0  # a replica that sleeps is awake at once
    arriving = _arriving(signals, memory)
    now, rate = arriving.requests_per_s, arriving.after(horizon_s)
    lengths_confidence = _confidence(signals.lengths.output.total)
    lower_bound = rate * lengths_confidence * _confidence(arriving.num_requests)
    # The work of the requests varies as well as their number.
    upper_bound = 1.0 + UPPER_BOUND_SPREADS * math.sqrt((1.0 + _variation(signals)) / max(1.0, arriving.num_requests))
    waiting = float(signals.num_waiting)
    load = offered_load(signals, max(rate, 1.0), CAPACITY_SHARE) if waiting else None
    predictor = _predictor_of(memory.shape)
    capacity = None
    if load is not None and predictor is not None and not _is_contradicted(signals, memory, horizon_s):
        capacity = predictor.highest_rate(load, 1, lambda found: math.isfinite(found.ttft_ms)) or None
    found = ExpectedLoad(
        horizon_s, rate, now, lower_bound, lengths_confidence, upper_bound, waiting, capacity, predictor
    )
    if load is None or capacity is None:
        return found
    served = capacity * (fleet.ready * horizon_s + fleet.starting * min(fleet.starting_s, horizon_s))
    # A prompt that is longer than usual counts as several requests.
    tokens = signals.engines.num_tokens_waiting + signals.queue.num_tokens
    waiting = max(waiting, tokens / max(1.0, load.computed_tokens))
    left = max(0.0, waiting + arriving.requests_per_s * horizon_s - served)
    return msgspec.structs.replace(found, num_waiting=left)


class _Arriving(NamedTuple):
    """The rate of the arrivals now, and its growth."""

    requests_per_s: float
    num_requests: float
    """The requests that determine it; those that arrive together count as one."""
    slope: float = 0.0
    lasts_s: float = 0.0
    """The time for which the slope is extrapolated: as long as it has lasted."""

    def after(self, horizon_s: float) -> float:
        # A rise that is young compared to the horizon is likely to end before it; often it is a step.
        likely = min(1.0, self.lasts_s / horizon_s) if horizon_s > 0 else 1.0
        grown = self.requests_per_s + max(0.0, self.slope) * min(horizon_s, self.lasts_s) * likely
        return min(MOST_GROWTH * self.requests_per_s, grown)


def _arriving(signals: Signals, memory: Memory) -> _Arriving:
    arrivals = signals.arrivals
    if arrivals.truth != "value":
        return _Arriving(0.0, 0.0)
    window_s, together = arrivals.burst_window_s, memory.dispersion(arrivals)
    if is_burst(signals, memory):
        return _Arriving(arrivals.burst_requests_per_s, arrivals.burst_requests_per_s * window_s / together)
    counts = [each.requests_per_s * window_s for each in memory.counts]
    ages_s = [signals.at_s - each.at_s + window_s / 2 for each in memory.counts]
    found = trend(counts, ages_s, window_s, together)
    if found is None:
        return _Arriving(arrivals.requests_per_s, arrivals.requests_per_s * arrivals.window_s / together)
    return _Arriving(found.requests_per_s, found.num_requests / together, found.slope, found.duration_s)


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
    return OfferedLoad(rate, prompt, computed, high, output, computed_variation=_variation(signals))


def _variation(signals: Signals) -> float:
    return min(MOST_VARIATION, signals.lengths.computed.squared_variation() or 0.0)


def _predictor_of(shape: Shape | None) -> Predictor | None:
    if shape is None:
        return None
    try:
        predictor = Predictor(shape, CAPACITY_SHARE)
    except ValueError:
        return None
    return predictor if predictor.known else None


def _confidence(num_samples: float) -> float:
    """Return the lower bound of a mean of so many samples as a share of it; 1 from `FEW_SAMPLES` on.

    The standard deviation of a sample is taken to be its mean, as for lengths of answers.
    """
    if num_samples >= FEW_SAMPLES:
        return 1.0
    return max(0.0, 1.0 - LOWER_BOUND_SPREADS / math.sqrt(num_samples)) if num_samples > 0 else 0.0


def is_burst(signals: Signals, memory: Memory) -> bool:
    """Whether the rate of the last seconds is twice that of the minute, and significantly so."""
    arrivals = signals.arrivals
    fast, slow, window_s = arrivals.burst_requests_per_s, arrivals.requests_per_s, arrivals.burst_window_s
    if arrivals.truth != "value" or window_s <= 0 or arrivals.window_s <= window_s:
        return False
    spread = math.sqrt(memory.dispersion(arrivals) * max(slow, 1 / window_s) / window_s)
    return fast >= BURST * slow and fast - slow > BURST_SPREADS * spread
