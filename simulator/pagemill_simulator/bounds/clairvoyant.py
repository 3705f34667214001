"""Searches the best schedules of replicas for traffic that is known ahead, with the simulation itself.

First, constant numbers of replicas are simulated one after the other, which shows for each window of time how many
requests miss the SLO with how many replicas. From that, dynamic programming computes the cheapest course of replicas
for several prices of a missed request: a start costs its loading, keeping a replica costs its time. This ignores
requests that wait from one window to the next, so changes are tried afterwards: a window with one replica more or
fewer, or a change earlier or later. `informed` is the bound without foresight.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pagemill_simulator.bounds.schedule import GRID_S, Order, Schedule
from pagemill_simulator.bounds.trials import Trial, Trials, share
from pagemill_simulator.fleet.outcome import FleetOutcome
from pagemill_simulator.fleet.settings import ColdStart

NUM_CHANGES = 24
"""Number of changes that are tried."""
NUM_WINDOWS = 60
LEAST_WINDOW_S = 10.0
PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Prices of a missed request, in pod-seconds as multiples of what a request takes on average."""
AHEAD = 1.15
"""How long before it is needed a replica is ordered, in median starts, because starts vary."""
TOLERANCE = 0.005
"""How much lower the share within the SLO may be than the best one for a lower cost."""


def search(
    trials: Trials, *, others: Iterable[FleetOutcome] = (), num_changes: int = NUM_CHANGES, seed: int = 0
) -> Trial:
    """Return the cheapest schedule whose share within the SLO is within half a point of the best that was found.

    `others` are outcomes of policies on the same workload and fleet; their orders are tried as schedules too. All tried
    schedules stay in `trials`.
    """
    for other in others:
        trials.add(Schedule.ordered(other.timeline), other)
    missed, window_s = _constant(trials)
    if found := _fewest_suffice(trials):
        return found
    for price in PRICES:
        ready = cheapest_schedule(missed, window_s, price * _pod_seconds_each(trials), trials.settings.cold_start)
        trials.challenge(Schedule.ready_at(ready, window_s, AHEAD * trials.settings.cold_start.total_s))
    draw = random.Random(f"changes {seed}")
    for _ in range(num_changes):
        start = draw.choice(_near_best(trials))
        trials.challenge(_changed(start.schedule, trials, draw))
    return trials.cheapest(trials.best_share() - TOLERANCE)


def _fewest_suffice(trials: Trials) -> Trial | None:
    """Return the trial of the lowest allowed number of replicas if its share is near the best: nothing costs less."""
    fewest = trials.settings.bounds.min_replicas
    if not fewest:
        return None
    constant = trials.try_out(Schedule.constant(fewest))
    is_near = share(constant.missed, trials.workload.requests) >= trials.best_share() - TOLERANCE
    return constant if is_near else None


def _near_best(trials: Trials) -> Sequence[Trial]:
    """Return the trials of the frontier that are worth a change: the cheapest ones miss half of all requests."""
    most = max(10, len(trials.workload.requests) // 2)
    return [each for each in trials.frontier if each.missed <= most] or trials.frontier


def _pod_seconds_each(trials: Trials) -> float:
    """Return the pod-seconds per request where nearly all are within the SLO."""
    return trials.cheapest(0.95).pod_seconds / max(1, len(trials.workload.requests))


def _constant(trials: Trials) -> tuple[dict[int, list[int]], float]:
    """Return the missed requests of each window by number of replicas, and the length of a window."""
    low, high = trials.settings.bounds
    duration_s = max(GRID_S, trials.workload.duration_s)
    window_s = max(LEAST_WINDOW_S, duration_s / NUM_WINDOWS)
    num_windows = math.ceil(duration_s / window_s)

    def by_window(arrivals_s: Iterable[float]) -> list[int]:
        counts = Counter(min(int(at_s / window_s), num_windows - 1) for at_s in arrivals_s)
        return [counts[window] for window in range(num_windows)]

    missed = {}
    if low == 0:
        missed[0] = by_window(request.arrival_s for request in trials.workload.requests)
    fewest = math.inf
    for replicas in _numbers(max(1, low), high):
        found = by_window(trials.try_out(Schedule.constant(replicas)).missed_arrivals_s)
        missed[replicas] = found
        if fewest - sum(found) <= len(trials.workload.requests) // 2000:
            break
        fewest = sum(found)
    return missed, window_s


def _numbers(low: int, high: int) -> Iterable[int]:
    """Yield numbers from low to high, each at most a third more than the one before."""
    number = low
    while number < high:
        yield number
        number = max(number + 1, number * 4 // 3)
    yield high


def cheapest_schedule(
    missed: Mapping[int, Sequence[int]], window_s: float, price: float, start: ColdStart
) -> list[int]:
    """Return the replicas in each window, at `price` pod-seconds per missed request.

    `missed` has the missed requests of each window, by the numbers of replicas to choose from. An added replica also
    costs the time of its loading.
    """
    loading = start.total_s - start.schedule_s
    numbers = list(missed)
    costs = {number: price * missed[number][0] + number * window_s for number in numbers}
    came_from: list[dict[int, int]] = []
    for window in range(1, len(missed[numbers[0]])):
        best = {
            number: min((costs[before] + loading * max(0, number - before), before) for before in numbers)
            for number in numbers
        }
        came_from.append({number: before for number, (_, before) in best.items()})
        costs = {number: best[number][0] + price * missed[number][window] + number * window_s for number in numbers}
    ready_by_window = [min(numbers, key=lambda number: costs[number])]
    for before in reversed(came_from):
        ready_by_window.append(before[ready_by_window[-1]])
    return ready_by_window[::-1]


def _changed(schedule: Schedule, trials: Trials, draw: random.Random) -> Schedule:
    """Return the schedule with one random change, of a number or of a time."""
    low, high = trials.settings.bounds
    orders = list(schedule.orders)
    place = draw.randrange(len(orders))
    at_s, replicas = orders[place]
    if place and draw.random() < 0.5:
        by_s = draw.choice((-1, 1)) * trials.settings.cold_start.total_s * draw.choice((0.25, 0.5, 1.0))
        orders[place] = Order(max(GRID_S, at_s + by_s), replicas)
        return Schedule.of(sorted(orders))
    ends = [order.at_s for order in orders[place + 1 : place + 2]] or [trials.workload.duration_s]
    other = max(low, min(high, replicas + draw.choice((-1, 1))))
    begin_s, end_s = at_s, ends[0]
    if draw.random() < 0.5:
        middle_s = draw.uniform(begin_s, end_s)
        begin_s, end_s = draw.choice(((begin_s, middle_s), (middle_s, end_s)))
    changed = [order for order in orders if not begin_s <= order.at_s < end_s]
    return Schedule.of(sorted([*changed, Order(begin_s, other), *([Order(end_s, schedule.at(end_s))])]))
