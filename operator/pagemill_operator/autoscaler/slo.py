"""The SLO as a goal: the fewest replicas that meet it when one ordered now would be ready.

The load is taken as it will be by then: a rise that stands out of the noise is carried on over the cold start, and what
waits already must be worked off within about as long.
"""

from __future__ import annotations

import math

import msgspec

from pagemill_operator.autoscaler.memory import TREND_S, Memory, Rate, Shape
from pagemill_operator.autoscaler.policy import Policy, Slo
from pagemill_operator.autoscaler.prediction import Demand, Predictor
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.wishes import MARGIN, Goal
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
"""A rise is carried on to no more than this many times the present load."""


class Candidate(msgspec.Struct, frozen=True):
    replicas: int
    ttft_ms: float | None
    """None: without bound."""
    tpot_ms: float | None
    meets: bool
    limit: str = ""


class Outlook(msgspec.Struct, frozen=True):
    goal: Goal = Goal("slo")
    candidates: tuple[Candidate, ...] = ()


def outlook(policy: Policy, slo: Slo, signals: Signals, memory: Memory) -> Outlook:
    """What the SLO asks for, and every number of replicas that was weighed."""
    if signals.arrivals.truth != "value":
        return Outlook(Goal("slo", missing=f"the arrivals are {signals.arrivals.truth}"))
    rate = forecast(signals, memory)
    if rate <= 0:
        return Outlook(Goal("slo", reason="nothing arrives"))
    demand = _demand(signals, rate, slo.share)
    if demand is None:
        return Outlook(Goal("slo", missing="no answer has ended yet, so its length is not known"))
    predictor = _predictor(memory.shape, slo)
    if predictor is None:
        return Outlook(Goal("slo", missing="the engines have told no step times yet"))
    weighed: dict[int, Candidate] = {}

    needed = fewest(predictor, demand, slo, policy.max_replicas, weighed)
    seen = tuple(weighed[number] for number in sorted(weighed))
    words = f"{rate:.2f} requests/s of {demand.computed_tokens:.0f} + {demand.output_tokens:.0f} tokens"
    if needed > policy.max_replicas:
        best = _best(weighed)
        goal = Goal("slo", policy.max_replicas, policy.max_replicas, words, unreachable=_unreachable(policy, slo, best))
        return Outlook(goal, seen)
    enough = min(policy.max_replicas, fewest(predictor, demand.times(MARGIN), slo, policy.max_replicas, {}))
    return Outlook(Goal("slo", needed, max(needed, enough), f"{words} need {needed}"), seen)


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
    # Longer than the cold start the waiting need not wait; sooner nobody could come.
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


def _demand(signals: Signals, rate: float, share: float) -> Demand | None:
    lengths = signals.lengths
    prompt, computed, output = lengths.prompt.mean(), lengths.computed.mean(), lengths.output.mean()
    high = lengths.computed.quantile(share)
    if lengths.truth != "value" or prompt is None or computed is None or output is None or high is None:
        return None
    return Demand(rate, prompt, computed, high, output)


def _predictor(shape: Shape | None, slo: Slo) -> Predictor | None:
    if shape is None:
        return None
    try:
        predictor = Predictor(shape, slo.share)
    except ValueError:
        return None
    return predictor if predictor.known else None


def fewest(predictor: Predictor, demand: Demand, slo: Slo, most: int, weighed: dict[int, Candidate]) -> int:
    """The smallest number that meets it, at most `most` + 1: more replicas are never slower. `weighed` is filled."""
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        weighed[middle] = candidate = weigh(predictor, demand, slo, middle)
        if candidate.meets:
            high = middle
        else:
            low = middle + 1
    return low


def weigh(predictor: Predictor, demand: Demand, slo: Slo, replicas: int) -> Candidate:
    """What so many replicas would give."""
    prediction = predictor.predict(demand, replicas)
    ttft_ms, tpot_ms = prediction.ttft_ms, prediction.tpot_ms
    meets = ttft_ms <= (slo.ttft_ms or math.inf) and tpot_ms <= (slo.tpot_ms or math.inf)
    return Candidate(
        replicas,
        round(ttft_ms, 1) if math.isfinite(ttft_ms) else None,
        round(tpot_ms, 2) if math.isfinite(tpot_ms) else None,
        meets and math.isfinite(ttft_ms) and math.isfinite(tpot_ms),
        prediction.limit,
    )


def _best(weighed: dict[int, Candidate]) -> Candidate:
    return weighed[max(weighed)]


def _unreachable(policy: Policy, slo: Slo, best: Candidate) -> str:
    wanted = [f"ttft {slo.ttft_ms:.0f} ms" if slo.ttft_ms else "", f"tpot {slo.tpot_ms:.0f} ms" if slo.tpot_ms else ""]
    reach = (
        f"the best is ttft {best.ttft_ms:.0f} ms and tpot {best.tpot_ms:.0f} ms"
        if best.ttft_ms is not None and best.tpot_ms is not None
        else f"even those run out of {best.limit or 'steps'}"
    )
    aim = " and ".join(filter(None, wanted))
    return f"{policy.max_replicas} replicas do not reach {aim}: {reach}; raise maxReplicas or the SLO"
