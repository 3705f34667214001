"""The goal of the SLO: the fewest replicas that are predicted to meet it when a replica ordered now would be ready.

The load is the one expected at that time (`expected_load`). The goal's reason names what another replica would gain:
how many requests per minute would miss the SLO without it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill_operator.autoscaler.decision import Goal, ReplicaCandidate, replicas_of
from pagemill_operator.autoscaler.expected_load import ExpectedLoad, offered_load
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Signals
from pagemill_operator.autoscaler.targets import AMPLE, MARGIN
from pagemill_protocol.report.prediction import LEAST_RATE, OfferedLoad, Prediction, Predictor

SHORTAGE = 0.02
"""No replica is ordered for a shortage of at most this share of the arrivals, as no rate is known more precisely."""
STEADY_MISSES = 0.4
"""Steady load is planned for this part of the misses that the SLO allows, as far as replicas for 1.1 times the load
suffice; changes of the load use the rest."""
MISS_COST = 10.0
"""The cost of a request that misses the SLO, as a multiple of the cost of serving one on fully used replicas."""
LOWER_SHARES = tuple(each / 100 for each in range(95, 45, -5))
"""Shares of the requests for which an SLO is planned that fewer than its own share can meet."""
LONGEST_DRAIN_S = 3600.0


class SloTarget(msgspec.Struct, frozen=True):
    """The goal of the SLO and the numbers of replicas that were weighed for it."""

    goal: Goal = Goal("slo")
    candidates: tuple[ReplicaCandidate, ...] = ()
    """First those that were weighed at the stricter percentile, then those that limit their number."""


def slo_target(
    settings: ScalingSettings, slo: Slo, signals: Signals, memory: Memory, expected: ExpectedLoad
) -> SloTarget:
    """Return the goal of the SLO, and every number of replicas that was weighed for `Goal.needed`.

    Where no number of replicas meets the SLO, because too many requests alone take longer, the goal is that of the
    requests that can meet it.
    """
    found = _target(settings, slo, signals, memory, expected)
    if not found.goal.unreachable or expected.predictor is None:
        return found
    attainable = _attainable(signals, expected.predictor, slo)
    if attainable == slo:
        return found
    reached = _target(settings, attainable, signals, memory, expected)
    unreachable = reached.goal.unreachable or _too_slow(slo, attainable)
    return SloTarget(msgspec.structs.replace(reached.goal, unreachable=unreachable), reached.candidates)


def _attainable(signals: Signals, predictor: Predictor, slo: Slo) -> Slo:
    """Return the SLO for the largest share of the requests that a replica without other requests serves in time.

    Where that is less than half of them, the SLO without limits, which is met by replicas that serve the load at all.
    """
    for share in (slo.share, *(each for each in LOWER_SHARES if each < slo.share)):
        load = offered_load(signals, LEAST_RATE, share)
        if load is not None and meets(predictor.at(share).predict(load, 1), slo):
            return msgspec.structs.replace(slo, share=share)
    return Slo(share=LOWER_SHARES[-1])


def _target(settings: ScalingSettings, slo: Slo, signals: Signals, memory: Memory, expected: ExpectedLoad) -> SloTarget:
    if signals.arrivals.truth != "value":
        return SloTarget(Goal("slo", missing=f"the arrivals are {signals.arrivals.truth}"))
    rate = expected.requests_per_s
    if rate <= 0 or signals.has_no_traffic:
        return SloTarget(Goal("slo", reason="nothing arrives"))
    load = offered_load(signals, rate, slo.share)
    if load is None or not expected.lengths_confidence:
        number = "no answer has" if load is None else "too few answers have"
        return SloTarget(Goal("slo", missing=f"{number} ended yet, so lengths are not known"))
    load = msgspec.structs.replace(load, dispersion=memory.dispersion(signals.arrivals))
    if expected.predictor is None:
        return SloTarget(Goal("slo", missing="the engines have reported no step times yet"))
    strict_share = 1.0 - STEADY_MISSES * (1.0 - slo.share)
    predictor, strict = expected.predictor.at(slo.share), expected.predictor.at(strict_share)
    weighed: dict[int, ReplicaCandidate] = {}
    limiting: dict[int, ReplicaCandidate] = {}

    most, wanted = settings.max_replicas, signals.fleet.wanted
    bound = msgspec.structs.replace(load, requests_per_s=expected.arrivals_lower_bound_per_s)
    # Some requests are too long for the stricter share with any number of replicas.
    highest = fewest(predictor, bound.times(MARGIN), slo, most, limiting)
    needed = min(highest, fewest(strict, bound, slo, most, weighed))
    seen = tuple(each[number] for each in (weighed, limiting) for number in sorted(each))
    offered = f"{bound.requests_per_s:.2f} requests/s of {load.computed_tokens:.0f} + {load.output_tokens:.0f} tokens"
    if needed > most and not (best := weigh(predictor, bound, slo, most)).meets:
        unreachable = _unreachable(settings, slo, best)
        return SloTarget(Goal("slo", most, most, offered, unreachable=unreachable), seen)
    needed = min(needed, most)
    queue = _for_queue(
        predictor, bound, slo, expected, needed, most, memory.idle_window_s(settings, expected.horizon_s)
    )
    # An order has the same margin: without the upper bound, chance alone would take removals back.
    margin = min(AMPLE, MARGIN * expected.upper_bound)
    enough, ample = (min(most, fewest(predictor, load.times(each), slo, most, {})) for each in (margin, AMPLE))
    settled_load = msgspec.structs.replace(load, requests_per_s=margin * expected.settled_per_s)
    settled = min(most, fewest(predictor, settled_load, slo, most, {}))
    reason = f"{offered} need {replicas_of(needed)}"
    if needed > wanted > 0:
        shortage = _shortage(predictor, strict, load, slo, expected, wanted)
        if shortage.is_slight:
            needed, reason = wanted, f"{offered}: with {wanted}, no more than {shortage.text}, too few to measure"
        else:
            reason += f"; with {wanted}, {shortage.text}"
    if queue.replicas:
        needed, reason = needed + queue.replicas, f"{reason}; {queue.reason}"
    return SloTarget(Goal("slo", needed, max(needed, enough), reason, ample=ample, settled=settled), seen)


class _Shortage(NamedTuple):
    """The arrivals that would miss the SLO with the present replicas."""

    is_slight: bool
    text: str


def _shortage(
    predictor: Predictor, strict: Predictor, load: OfferedLoad, slo: Slo, expected: ExpectedLoad, replicas: int
) -> _Shortage:
    arriving = expected.arrivals_lower_bound_per_s
    held = max(
        each.highest_rate(load, replicas, lambda found: meets(found, slo), SHORTAGE / 10) / margin
        for each, margin in ((predictor, MARGIN), (strict, 1.0))
    )
    short = arriving - held
    text = f"{_number(60 * short)} requests/min would miss {_slo_text(slo)} from {expected.horizon_s:.0f} s on"
    return _Shortage(short <= SHORTAGE * arriving, text)


class _ForQueue(NamedTuple):
    """Replicas beyond those that the arrivals need, because requests will wait."""

    replicas: int = 0
    reason: str = ""


def _for_queue(
    predictor: Predictor,
    load: OfferedLoad,
    slo: Slo,
    expected: ExpectedLoad,
    needed: int,
    most: int,
    keep_s: float,
) -> _ForQueue:
    """Return the replicas that cost least, together with the requests that would miss the SLO until the queue is short.

    Requests miss it while those before them take longer than the SLO's time to first token. A replica that is ordered
    for the queue costs its start, the time until the queue is short, and `keep_s` until it is removed.
    """
    waiting, ttft_s = expected.lengths_confidence * expected.num_waiting, (slo.ttft_ms or 0.0) / 1000
    if waiting <= load.requests_per_s * ttft_s:
        return _ForQueue()  # the needed replicas serve at least the arrivals
    held = predictor.highest_rate(load, needed, lambda found: meets(found, slo))
    late = waiting - held * ttft_s
    if late <= 0 or held <= 0:
        return _ForQueue()
    spare = max(0.0, held - load.requests_per_s)

    def drain_s(extra: int) -> float:
        drained_per_s = spare + extra * held / needed
        return min(LONGEST_DRAIN_S, late / drained_per_s) if drained_per_s > 0 else LONGEST_DRAIN_S

    def cost(extra: int) -> float:
        """Return the cost in pod-seconds."""
        return MISS_COST * needed * drain_s(extra) + extra * (expected.horizon_s + drain_s(extra) + keep_s)

    extra = min(range(most - needed + 1), key=cost)
    reason = (
        f"{_number(late)} requests too many will wait in {expected.horizon_s:.0f} s: {extra} more serve them within "
        f"{drain_s(extra):.0f} s instead of {drain_s(0):.0f} s"
    )
    return _ForQueue(extra, reason)


def fewest(predictor: Predictor, load: OfferedLoad, slo: Slo, most: int, weighed: dict[int, ReplicaCandidate]) -> int:
    """Return the fewest replicas that meet the SLO, or `most` + 1 where none do.

    A bisection, since more replicas are never slower. Each number that was weighed is added to `weighed`.
    """
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        weighed[middle] = candidate = weigh(predictor, load, slo, middle)
        if candidate.meets:
            high = middle
        else:
            low = middle + 1
    return low


def weigh(predictor: Predictor, load: OfferedLoad, slo: Slo, replicas: int) -> ReplicaCandidate:
    """Predict the latencies that a number of replicas would give."""
    prediction = predictor.predict(load, replicas)
    ttft_ms, tpot_ms = prediction.ttft_ms, prediction.tpot_ms
    return ReplicaCandidate(
        replicas,
        round(ttft_ms, 1) if math.isfinite(ttft_ms) else None,
        round(tpot_ms, 2) if math.isfinite(tpot_ms) else None,
        meets(prediction, slo),
        prediction.limit,
        predictor.share,
        round(load.requests_per_s, 3),
    )


def meets(prediction: Prediction, slo: Slo) -> bool:
    """Whether the predicted latencies meet the SLO."""
    ttft_ms, tpot_ms = prediction.ttft_ms, prediction.tpot_ms
    if not (math.isfinite(ttft_ms) and math.isfinite(tpot_ms)):
        return False
    return ttft_ms <= (slo.ttft_ms or math.inf) and tpot_ms <= (slo.tpot_ms or math.inf)


def _number(value: float) -> str:
    """Return the value as a whole number, or with one digit where it is below 1."""
    return f"{value:.0f}" if value >= 1 else f"{value:.1g}"


def _slo_text(slo: Slo) -> str:
    named = [f"ttft {slo.ttft_ms:.0f} ms" if slo.ttft_ms else "", f"tpot {slo.tpot_ms:.0f} ms" if slo.tpot_ms else ""]
    return " and ".join(filter(None, named))


def _too_slow(slo: Slo, attainable: Slo) -> str:
    if attainable.ttft_ms is None and attainable.tpot_ms is None:
        return f"a replica that serves a single request does not reach {_slo_text(slo)}; raise the SLO"
    return (
        f"no number of replicas reaches {_slo_text(slo)} for more than {100 * attainable.share:.0f} % of the requests, "
        "as the others take longer alone; raise the SLO"
    )


def _unreachable(settings: ScalingSettings, slo: Slo, best: ReplicaCandidate) -> str:
    reach = (
        f"the best is ttft {best.ttft_ms:.0f} ms and tpot {best.tpot_ms:.0f} ms"
        if best.ttft_ms is not None and best.tpot_ms is not None
        else f"even those run out of {best.limit or 'steps'}"
    )
    return f"{settings.max_replicas} replicas do not reach {_slo_text(slo)}: {reach}; raise maxReplicas or the SLO"
