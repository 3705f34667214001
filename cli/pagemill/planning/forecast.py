"""Computes how many replicas a load needs, their latencies and their cost, with the autoscaler's own prediction.

For a running deployment the operator uses the same functions with the measured load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pagemill.planning.errors import PlanError
from pagemill.planning.replica import PlannedReplica, check_length
from pagemill.planning.users import Cycles, Users
from pagemill_operator.autoscaler.decision import ReplicaCandidate
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import fewest, weigh
from pagemill_operator.autoscaler.targets import MARGIN
from pagemill_protocol.report.prediction import OfferedLoad, Predictor

HOUR_S = 3600.0
IDLE_RPS = 1e-6
NEIGHBOURS = 1
"""How many smaller and larger numbers of replicas are shown besides the chosen one."""
ROUNDS = 40


class PlannedWorkload(NamedTuple):
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Tokens of each prompt that are found in the prefix cache."""
    users: Users | None = None
    """The users who produce this rate; `None` if the rate was given."""
    answering: float | None = None
    """The mean number of users who wait for the end of an answer."""

    @property
    def offered(self) -> OfferedLoad:
        computed = max(1, self.input_tokens - self.cached_tokens)
        return OfferedLoad(self.requests_per_s, self.input_tokens, computed, computed, self.output_tokens)

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens of one request."""
        return self.input_tokens + self.output_tokens

    def at(self, requests_per_s: float) -> PlannedWorkload:
        return self._replace(requests_per_s=requests_per_s)


class ServingCost(NamedTuple):
    per_hour: float
    per_million_tokens: float
    """Per million tokens of prompts and answers together."""
    per_million_output_tokens: float


class ForecastRow(NamedTuple):
    candidate: ReplicaCandidate
    """The autoscaler's prediction."""
    cost: ServingCost | None


class Forecast(NamedTuple):
    """The result of a plan, computed without a simulation."""

    needed: int | None
    """The fewest replicas that meet the SLO; `None`: no number up to `most` does."""
    kept: int | None
    """The replicas that the autoscaler keeps: it removes one only if the rest can carry 10 % more load."""
    most: int
    idle: ReplicaCandidate
    """The latencies of a request that has a replica for itself: the lower bound for any number of replicas."""
    rows: list[ForecastRow]
    """The chosen number and its neighbours; the maximum if no number suffices."""
    capacity: float
    """Requests per second that one replica carries within the SLO."""
    at_once: int
    """Requests of the workload's length that fit in one replica at the same time."""
    at_once_longest: int
    """Requests of the maximum length that fit in one replica at the same time."""
    utilization: float | None
    """The load as a share of the chosen replicas' capacity; `None` if they have no capacity within the SLO."""
    users_supported: int | None = None
    """The users that one replica can serve within the SLO; `None` if a rate was given."""

    @property
    def chosen(self) -> ReplicaCandidate:
        """The prediction for the needed number of replicas, or for the maximum if no number suffices."""
        return next(row.candidate for row in self.rows if row.candidate.replicas == (self.needed or self.most))


def of_users(replica: PlannedReplica, lengths: PlannedWorkload, users: Users, slo: Slo, most: int) -> PlannedWorkload:
    """Return the load that the users produce on the fewest replicas that meet the SLO.

    If up to `most` replicas do not meet it, return the load at the latencies of an idle replica. Raises `PlanError`.
    """
    check_length(lengths.input_tokens, lengths.output_tokens, replica.max_model_len)
    predictor_of(replica, slo)
    cycles = Cycles(replica, lengths.offered, users)
    found = cycles.fewest(slo, most)
    asking = found[1] if found is not None else cycles.at_most()
    return lengths._replace(requests_per_s=asking.requests_per_s, users=users, answering=asking.answering)


def forecast(
    replica: PlannedReplica, workload: PlannedWorkload, slo: Slo, most: int, price_per_hour: float | None
) -> Forecast:
    """Compute the plan; `price_per_hour` is the price of one replica. Raises `PlanError` if requests are too long."""
    check_length(workload.input_tokens, workload.output_tokens, replica.max_model_len)
    predictor = predictor_of(replica, slo)
    load = workload.offered
    found = fewest(predictor, load, slo, most, {})
    needed = found if found <= most else None
    capacity = highest_rate(lambda rate: weigh(predictor, workload.at(rate).offered, slo, 1).meets)
    kept = None
    if needed is not None:
        kept = max(needed, min(most, fewest(predictor, load.times(MARGIN), slo, most, {})))
    numbers = [most] if needed is None else range(max(1, needed - NEIGHBOURS), min(most, needed + NEIGHBOURS) + 1)
    tokens, longest = replica.shape.num_tokens, replica.blocks_at_longest or replica.shape.num_blocks
    cycles = None if workload.users is None else Cycles(replica, load, workload.users)
    return Forecast(
        needed=needed,
        kept=kept,
        most=most,
        idle=weigh(predictor, workload.at(IDLE_RPS).offered, slo, 1),
        rows=[ForecastRow(weigh(predictor, load, slo, n), _cost(n, workload, price_per_hour)) for n in numbers],
        capacity=capacity,
        at_once=min(replica.shape.max_num_seqs, tokens // workload.tokens),
        at_once_longest=min(replica.shape.max_num_seqs, longest * replica.shape.block_size // replica.max_model_len),
        utilization=workload.requests_per_s / ((needed or most) * capacity) if capacity else None,
        users_supported=None if cycles is None else cycles.supported(capacity),
    )


def predictor_of(replica: PlannedReplica, slo: Slo) -> Predictor:
    """Return the predictor for the SLO's percentile. Raises `PlanError` if the step times are unknown."""
    predictor = Predictor(replica.shape, slo.share)
    if not predictor.known:
        raise PlanError("the engine reported no step times; raise --measure-s, or give step times with --fit")
    return predictor


def highest_rate(meets: Callable[[float], bool]) -> float:
    """Return the most requests per second that meet the SLO, found by bisection to 0.1 %."""
    low, high = 0.0, 1.0
    while meets(high) and high < 1e9:
        low, high = high, 2 * high
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
        if high - low < 1e-3 * high:
            break
    return low


def _cost(replicas: int, workload: PlannedWorkload, price_per_hour: float | None) -> ServingCost | None:
    return None if price_per_hour is None else cost_of(replicas * price_per_hour, workload)


def cost_of(per_hour: float, workload: PlannedWorkload) -> ServingCost:
    """Return the cost of replicas with this price together."""
    requests = workload.requests_per_s * HOUR_S
    tokens, output_tokens = requests * workload.tokens, requests * workload.output_tokens
    return ServingCost(per_hour, per_hour / tokens * 1e6, per_hour / output_tokens * 1e6)


def is_positive(number: float) -> bool:
    return 0 < number < math.inf
