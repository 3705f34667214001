"""The floor: a policy that knows every request and the cold start ahead, and orders each replica just in time.

The load that will come is given to the same prediction as Pagemill's own autoscaler uses; what this policy has ahead of
it is the knowledge of the load. Nothing is measured, so nothing that goes wrong is corrected. A replica that is needed
again before a new one could be ready stays.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.autoscaler.signals import Shape, Signals
from pagemill_operator.autoscaler.slo import fewest
from pagemill_simulator.scaling.fixed import NoMemory
from pagemill_simulator.scaling.rival import within
from pagemill_simulator.workloads.request import SimRequest, Workload

GRID_S = 5.0
WINDOW_S = 30.0
"""That rates are taken over; a multiple of the grid."""
DIGITS = 3
"""To which rates and lengths are rounded before replicas are predicted for them."""


class Clairvoyant:
    name: ClassVar[str] = "clairvoyant"
    memory_type: ClassVar[type[NoMemory]] = NoMemory
    sees_replicas: ClassVar[bool] = False
    interval_s: ClassVar[float] = GRID_S
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, max_replicas: int, workload: Workload, *, cold_start_s: float, shape: Shape, slo: Slo) -> None:
        """`cold_start_s`: from the order to ready. Raises `ValueError` for step times that are not known."""
        self._cold_start_s = cold_start_s
        self._needs = _needs(workload, max_replicas, shape, slo)

    def decide(self, settings: ScalingSettings, signals: Signals, memory: NoMemory) -> tuple[Decision, NoMemory]:
        """The most that will be needed until what is ordered at the next decision would be ready."""
        first = max(0, math.floor(signals.at_s / GRID_S))
        last = math.ceil((signals.at_s + self._cold_start_s + self.interval_s) / GRID_S)
        needed = max(self._needs[first : last + 1], default=0)
        replicas = within(settings, max(needed, signals.num_requests > 0))
        return decided(signals.fleet.wanted, replicas, f"requests that will come need {needed}"), memory


def _needs(workload: Workload, most: int, shape: Shape, slo: Slo) -> list[int]:
    """Replicas from each point of the grid to the next: for what comes right then, before or after."""
    predictor = Predictor(shape, slo.share)
    if not predictor.known:
        raise ValueError("the step times of the engines are not known: give them with the fleet's settings")
    ahead = _needs_ahead(workload, predictor, most, slo)
    back = round(WINDOW_S / GRID_S)
    return [max(need, ahead[point - back] if point >= back else 0) for point, need in enumerate(ahead)]


def _needs_ahead(workload: Workload, predictor: Predictor, most: int, slo: Slo) -> list[int]:
    """For the window that begins at each point, until there is nothing to the end of the last window."""
    requests = workload.requests
    computed = _computed_tokens(requests)
    high = sorted(computed)[max(0, math.ceil(slo.share * len(computed)) - 1)] if computed else 0
    times = [request.arrival_s for request in requests]
    sums = [
        [0, *accumulate(values)]
        for values in (
            [request.num_prompt_tokens for request in requests],
            computed,
            [request.num_output_tokens for request in requests],
        )
    ]
    known: dict[OfferedLoad, int] = {}
    needs = []
    for point in range(math.ceil((workload.duration_s + WINDOW_S) / GRID_S) + 1):
        begin, end = (bisect_left(times, point * GRID_S + offset_s) for offset_s in (0.0, WINDOW_S))
        if begin == end:
            needs.append(0)
            continue
        prompt, fresh, output = (_rounded((each[end] - each[begin]) / (end - begin)) for each in sums)
        load = OfferedLoad(_rounded((end - begin) / WINDOW_S), prompt, min(prompt, fresh), high, output)
        if load not in known:
            known[load] = min(most, fewest(predictor, load, slo, most, {}))
        needs.append(known[load])
    return needs


def _computed_tokens(requests: Sequence[SimRequest]) -> list[int]:
    """Tokens of each prompt without what an earlier turn of its session has left in the cache."""
    said: dict[int, int] = defaultdict(int)
    computed = []
    for request in requests:
        if request.session is None:
            computed.append(request.num_prompt_tokens)
            continue
        computed.append(max(1, request.num_prompt_tokens - said[request.session]))
        said[request.session] = request.num_prompt_tokens + request.num_output_tokens
    return computed


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
