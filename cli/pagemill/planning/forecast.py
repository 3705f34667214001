"""How many replicas a load needs, their latencies and their cost, computed by the autoscaler's own prediction.

The operator decides with the same functions once the deployment runs, from the load it really gets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pagemill.planning.errors import PlanError
from pagemill.planning.replica import Replica, check_length
from pagemill.planning.users import Cycles, Users
from pagemill_operator.autoscaler.decision import Candidate
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import fewest, weigh
from pagemill_operator.autoscaler.targets import MARGIN

HOUR_S = 3600.0
IDLE_RPS = 1e-6
NEIGHBOURS = 1
"""Numbers of replicas shown on each side of the chosen one."""
ROUNDS = 40


class Workload(NamedTuple):
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Tokens of each prompt that are found in the prefix cache."""
    users: Users | None = None
    """Who asks at this rate, where users are planned for and not a rate."""
    answering: float | None = None
    """Of them, those who wait for the end of an answer, on average."""

    @property
    def offered(self) -> OfferedLoad:
        computed = max(1, self.input_tokens - self.cached_tokens)
        return OfferedLoad(self.requests_per_s, self.input_tokens, computed, computed, self.output_tokens)

    @property
    def tokens(self) -> int:
        """Of one request."""
        return self.input_tokens + self.output_tokens

    def at(self, requests_per_s: float) -> Workload:
        return self._replace(requests_per_s=requests_per_s)


class Cost(NamedTuple):
    per_hour: float
    per_million_tokens: float
    """Per million tokens of prompts and answers together."""
    per_million_output_tokens: float


class Row(NamedTuple):
    candidate: Candidate
    """The autoscaler's prediction."""
    cost: Cost | None


class Forecast(NamedTuple):
    """Computed without a simulation; `rehearsal` simulates the chosen number."""

    needed: int | None
    """The fewest replicas that meet the SLO; `None`: no number up to `most` does."""
    kept: int | None
    """The replicas that the autoscaler keeps under this load: it removes one only if a tenth more load still fits."""
    most: int
    idle: Candidate
    """A replica that serves one request alone: no number of replicas is faster."""
    rows: list[Row]
    """The chosen number and its neighbours; the maximum if no number suffices."""
    capacity: float
    """Requests per second that one replica carries within the SLO."""
    at_once: int
    """Requests of this length that one replica holds."""
    at_once_longest: int
    """Requests of the longest accepted length that one replica holds."""
    utilization: float | None
    """The load as a share of what the chosen replicas carry; `None`: they carry nothing within the SLO."""
    users_supported: int | None = None
    """Users whom one replica serves within the SLO, where users are planned for."""

    @property
    def chosen(self) -> Candidate:
        """The needed number, or the maximum."""
        return next(row.candidate for row in self.rows if row.candidate.replicas == (self.needed or self.most))


def of_users(replica: Replica, lengths: Workload, users: Users, slo: Slo, most: int) -> Workload:
    """What they ask on the fewest replicas that keep the SLO; where none do, what they would ask of ever so many."""
    check_length(lengths.input_tokens, lengths.output_tokens, replica.max_model_len)
    _predictor(replica, slo)
    cycles = Cycles(replica, lengths.offered, users)
    found = cycles.fewest(slo, most)
    asking = found[1] if found is not None else cycles.at_most()
    return lengths._replace(requests_per_s=asking.requests_per_s, users=users, answering=asking.answering)


def forecast(replica: Replica, workload: Workload, slo: Slo, most: int, price_per_hour: float | None) -> Forecast:
    """`price_per_hour`: of one replica. Raises `PlanError` for a workload that no replica accepts."""
    check_length(workload.input_tokens, workload.output_tokens, replica.max_model_len)
    predictor = _predictor(replica, slo)
    load = workload.offered
    found = fewest(predictor, load, slo, most, {})
    needed = found if found <= most else None
    capacity = _capacity(predictor, workload, slo)
    kept = None
    if needed is not None:
        kept = max(needed, min(most, fewest(predictor, load.times(MARGIN), slo, most, {})))
    numbers = [most] if needed is None else range(max(1, needed - NEIGHBOURS), min(most, needed + NEIGHBOURS) + 1)
    tokens = replica.shape.num_tokens
    cycles = None if workload.users is None else Cycles(replica, load, workload.users)
    return Forecast(
        needed=needed,
        kept=kept,
        most=most,
        idle=weigh(predictor, workload.at(IDLE_RPS).offered, slo, 1),
        rows=[Row(weigh(predictor, load, slo, n), _cost(n, workload, price_per_hour)) for n in numbers],
        capacity=capacity,
        at_once=min(replica.shape.max_num_seqs, tokens // workload.tokens),
        at_once_longest=min(replica.shape.max_num_seqs, tokens // replica.max_model_len),
        utilization=workload.requests_per_s / ((needed or most) * capacity) if capacity else None,
        users_supported=None if cycles is None else cycles.supported(capacity),
    )


def _predictor(replica: Replica, slo: Slo) -> Predictor:
    predictor = Predictor(replica.shape, slo.share)
    if not predictor.known:
        raise PlanError("the engine reported no step times: give more time with --measure-s, or step times with --fit")
    return predictor


def _capacity(predictor: Predictor, workload: Workload, slo: Slo) -> float:
    """By bisection, to less than a thousandth."""

    def meets(requests_per_s: float) -> bool:
        return weigh(predictor, workload.at(requests_per_s).offered, slo, 1).meets

    low, high = 0.0, 1.0
    while meets(high) and high < 1e9:
        low, high = high, 2 * high
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
        if high - low < 1e-3 * high:
            break
    return low


def _cost(replicas: int, workload: Workload, price_per_hour: float | None) -> Cost | None:
    if price_per_hour is None:
        return None
    per_hour = replicas * price_per_hour
    requests = workload.requests_per_s * HOUR_S
    tokens, output_tokens = requests * workload.tokens, requests * workload.output_tokens
    return Cost(per_hour, per_hour / tokens * 1e6, per_hour / output_tokens * 1e6)


def is_positive(number: float) -> bool:
    return 0 < number < math.inf
