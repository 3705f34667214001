"""The SLO as a target: the fewest replicas that meet it when one ordered now would be ready.

The load is taken as it will be by then: a rise that stands out of the noise is extrapolated over the cold start, and
what waits already must be worked off within about as long.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_operator.autoscaler.decision import Candidate, Goal, replicas_of
from pagemill_operator.autoscaler.memory import TREND_S, Memory, Rate
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Shape, Signals
from pagemill_operator.autoscaler.targets import MARGIN
from pagemill_protocol.load import Arrivals

UNLEARNED_COLD_START_S = 60.0
LEAST_DRAIN_S = 10.0
BURST = 2.0
"""Times the rate of the minute."""
BURST_SPREADS = 5.0
TREND_SPREADS = 3.5
"""Standard deviations of Poisson arrivals that a burst, or a rise, must exceed."""
LEAST_TREND_S = 10.0
MOST_GROWTH = 3.0
"""A rise is extrapolated to no more than this many times the present load."""


class SloTarget(msgspec.Struct, frozen=True):
    goal: Goal = Goal("slo")
    candidates: tuple[Candidate, ...] = ()


def slo_target(settings: ScalingSettings, slo: Slo, signals: Signals, memory: Memory) -> SloTarget:
    """What the SLO asks for, and every number of replicas that was weighed."""
    if signals.arrivals.truth != "value":
        return SloTarget(Goal("slo", missing=f"the arrivals are {signals.arrivals.truth}"))
    rate = forecast(signals, memory)
    if rate <= 0:
        return SloTarget(Goal("slo", reason="nothing arrives"))
    load = _offered(signals, rate, slo.share)
    if load is None:
        return SloTarget(Goal("slo", missing="no answer has ended yet, so lengths are not known"))
    predictor = _predictor(memory.shape, slo)
    if predictor is None:
        return SloTarget(Goal("slo", missing="the engines have reported no step times yet"))
    weighed: dict[int, Candidate] = {}

    most = settings.max_replicas
    needed = fewest(predictor, load, slo, most, weighed)
    seen = tuple(weighed[number] for number in sorted(weighed))
    offered = f"{rate:.2f} requests/s of {load.computed_tokens:.0f} + {load.output_tokens:.0f} tokens"
    if needed > most:
        unreachable = _unreachable(settings, slo, weighed[max(weighed)])
        return SloTarget(Goal("slo", most, most, offered, unreachable=unreachable), seen)
    enough = min(most, fewest(predictor, load.times(MARGIN), slo, most, {}))
    return SloTarget(Goal("slo", needed, max(needed, enough), f"{offered} need {replicas_of(needed)}"), seen)


def forecast(signals: Signals, memory: Memory) -> float:
    """Requests per second when a replica ordered now is ready, the waiting included."""
    arrivals, cold_start_s = signals.arrivals, signals.fleet.cold_start_s
    horizon_s = UNLEARNED_COLD_START_S if cold_start_s is None else cold_start_s
    rate = arrivals.requests_per_s
    # The average over a window is that of its middle.
    ahead_s = arrivals.window_s / 2 + horizon_s
    rate = min(rate * MOST_GROWTH, rate + _slope(signals, memory) * ahead_s)
    if is_burst(signals):
        rate = max(rate, arrivals.burst_requests_per_s)
    # What waits is worked off within a cold start: no replica could be ready sooner.
    return rate + signals.num_waiting / max(LEAST_DRAIN_S, horizon_s)


def is_burst(signals: Signals) -> bool:
    """The last seconds have brought twice as much as the minute, and that is no chance."""
    arrivals = signals.arrivals
    fast, slow, window_s = arrivals.burst_requests_per_s, arrivals.requests_per_s, arrivals.burst_window_s
    if arrivals.truth != "value" or window_s <= 0 or arrivals.window_s <= window_s:
        return False
    spread = math.sqrt(max(slow, 1 / window_s) / window_s)
    return fast >= BURST * slow and fast - slow > BURST_SPREADS * spread


def _slope(signals: Signals, memory: Memory) -> float:
    """Requests per second more with each second, as far as a rise stands out of the noise; never negative.

    The latest rise that does: over half a minute, else over the shortest of the past minutes that shows one.
    """
    arrivals, now = signals.arrivals, signals.at_s
    recent = [rate for rate in memory.rates if LEAST_TREND_S <= now - rate.at_s <= TREND_S]
    older = [rate for rate in reversed(memory.rates) if now - rate.at_s > TREND_S]
    rises = (_rise(arrivals, before, now - before.at_s) for before in (*recent[:1], *older))
    return next((slope for slope in rises if slope > 0), 0.0)


def _rise(arrivals: Arrivals, before: Rate, apart_s: float) -> float:
    """Since that rate, for each second; 0 where chance may have made it."""
    if arrivals.window_s <= 0:
        return 0.0
    rise = arrivals.requests_per_s - before.requests_per_s
    # Where the two windows overlap, only what entered and what left them differs.
    differs_s = min(apart_s, arrivals.window_s)
    spread = math.sqrt((arrivals.requests_per_s + before.requests_per_s) * differs_s) / arrivals.window_s
    return rise / apart_s if rise > TREND_SPREADS * spread else 0.0


def _offered(signals: Signals, rate: float, share: float) -> OfferedLoad | None:
    lengths = signals.lengths
    prompt, computed, output = lengths.prompt.mean(), lengths.computed.mean(), lengths.output.mean()
    high = lengths.computed.quantile(share)
    if lengths.truth != "value" or prompt is None or computed is None or output is None or high is None:
        return None
    return OfferedLoad(rate, prompt, computed, high, output)


def _predictor(shape: Shape | None, slo: Slo) -> Predictor | None:
    if shape is None:
        return None
    try:
        predictor = Predictor(shape, slo.share)
    except ValueError:
        return None
    return predictor if predictor.known else None


def fewest(predictor: Predictor, load: OfferedLoad, slo: Slo, most: int, weighed: dict[int, Candidate]) -> int:
    """The smallest number that meets it, at most `most` + 1: more replicas are never slower. `weighed` is filled."""
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        weighed[middle] = candidate = weigh(predictor, load, slo, middle)
        if candidate.meets:
            high = middle
        else:
            low = middle + 1
    return low


def weigh(predictor: Predictor, load: OfferedLoad, slo: Slo, replicas: int) -> Candidate:
    """The latency that so many replicas would give."""
    prediction = predictor.predict(load, replicas)
    ttft_ms, tpot_ms = prediction.ttft_ms, prediction.tpot_ms
    meets = ttft_ms <= (slo.ttft_ms or math.inf) and tpot_ms <= (slo.tpot_ms or math.inf)
    return Candidate(
        replicas,
        round(ttft_ms, 1) if math.isfinite(ttft_ms) else None,
        round(tpot_ms, 2) if math.isfinite(tpot_ms) else None,
        meets and math.isfinite(ttft_ms) and math.isfinite(tpot_ms),
        prediction.limit,
    )


def _unreachable(settings: ScalingSettings, slo: Slo, best: Candidate) -> str:
    wanted = [f"ttft {slo.ttft_ms:.0f} ms" if slo.ttft_ms else "", f"tpot {slo.tpot_ms:.0f} ms" if slo.tpot_ms else ""]
    reach = (
        f"the best is ttft {best.ttft_ms:.0f} ms and tpot {best.tpot_ms:.0f} ms"
        if best.ttft_ms is not None and best.tpot_ms is not None
        else f"even those run out of {best.limit or 'steps'}"
    )
    aim = " and ".join(filter(None, wanted))
    return f"{settings.max_replicas} replicas do not reach {aim}: {reach}; raise maxReplicas or the SLO"
