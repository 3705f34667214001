"""The load of users, each of whom sends a request, waits for the answer, thinks, and sends the next request.

Little's law for a closed system (the interactive response time law): N users who think for Z seconds send X requests
per second with N = X (Z + R), where R is the mean duration of an answer and grows with X.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pagemill.planning.replica import PlannedReplica
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import weigh
from pagemill_protocol.report.prediction import OfferedLoad, Prediction, Predictor

MEAN = 0.5
"""The percentile, as a share, at which the autoscaler's prediction is the mean."""
ROUNDS = 60
SATURATED = 0.98
"""If the solution accounts for less than this share of the users, the replicas are saturated."""


class Users(NamedTuple):
    num_users: int
    think_s: float
    """Time from the end of an answer to the user's next request."""


class UserLoad(NamedTuple):
    """The load of all users in the steady state."""

    requests_per_s: float
    answering: float
    """The mean number of users who wait for the end of an answer; the others think."""


def steady(users: Users, answer_s: Callable[[float], float]) -> UserLoad | None:
    """Return the load in the steady state; `None` if the replicas are saturated.

    `answer_s`: the mean time of an answer in seconds at a rate of requests; infinite above the capacity.
    """

    def busy_users(rate: float) -> float:
        return rate * (users.think_s + answer_s(rate))

    low, high = 0.0, users.num_users / max(1e-9, users.think_s + answer_s(0.0))
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if busy_users(middle) <= users.num_users else (low, middle)
    if busy_users(low) < SATURATED * users.num_users:
        return None
    return asking_at(users, low)


def asking_at(users: Users, rate: float) -> UserLoad:
    """Return the load of users whose requests have this rate."""
    return UserLoad(rate, max(0.0, users.num_users - rate * users.think_s))


class Cycles:
    """Computes the steady state of users on a number of equal replicas."""

    def __init__(self, replica: PlannedReplica, lengths: OfferedLoad, users: Users) -> None:
        self._mean = Predictor(replica.shape, MEAN)
        self._shape = replica.shape
        self._lengths = lengths
        self._users = users

    def steady_load(self, replicas: int) -> UserLoad | None:
        """Return the load in the steady state; `None` if the replicas are saturated."""
        return steady(self._users, lambda rate: self._answer_s(rate, replicas))

    def fewest(self, slo: Slo, most: int) -> tuple[int, UserLoad] | None:
        """Return the smallest number of replicas that meets the SLO, and its load; `None` if more than `most`."""
        predictor = Predictor(self._shape, slo.share)
        low, high = 1, most + 1
        found: UserLoad | None = None
        while low < high:
            middle = (low + high) // 2
            each = self.steady_load(middle)
            if each is not None and weigh(predictor, self._at(each.requests_per_s), slo, middle).meets:
                high, found = middle, each
            else:
                low = middle + 1
        return None if found is None else (low, found)

    def at_most(self) -> UserLoad:
        """Return the load if every answer were as fast as on an idle replica: the upper bound."""
        users = self._users
        return asking_at(users, users.num_users / (users.think_s + self._answer_s(0.0, 1)))

    def supported(self, requests_per_s: float) -> int:
        """Return the number of users whose requests have this rate on one replica."""
        cycle_s = self._users.think_s + self._answer_s(requests_per_s, 1)
        return int(requests_per_s * cycle_s) if requests_per_s > 0 else 0

    def _answer_s(self, rate: float, replicas: int) -> float:
        """Return the mean time of an answer in seconds; infinite if the rate is above capacity."""
        found = self._mean.predict(self._at(max(rate, 1e-9)), replicas)
        return answer_s(found, self._lengths.output_tokens)

    def _at(self, rate: float) -> OfferedLoad:
        return msgspec.structs.replace(self._lengths, requests_per_s=rate)


def answer_s(mean: Prediction, output_tokens: float) -> float:
    """Return the mean time of an answer in seconds; infinite if a latency is."""
    if not (math.isfinite(mean.ttft_ms) and math.isfinite(mean.tpot_ms)):
        return math.inf
    return (mean.ttft_ms + (output_tokens - 1) * mean.tpot_ms) / 1000
