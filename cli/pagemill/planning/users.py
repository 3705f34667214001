"""The load of users, each of whom sends a request, waits for the answer, thinks, and sends the next request.

Little's law for a closed system (the interactive response time law): N users who think for Z seconds send X requests
per second with N = X (Z + R), where R is the mean duration of an answer and grows with X.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill.planning.replica import PlannedReplica
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import weigh

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


class Cycles:
    """Computes the steady state of users on a number of equal replicas."""

    def __init__(self, replica: PlannedReplica, lengths: OfferedLoad, users: Users) -> None:
        self._mean = Predictor(replica.shape, MEAN)
        self._shape = replica.shape
        self._lengths = lengths
        self._users = users

    def steady_load(self, replicas: int) -> UserLoad | None:
        """Return the load in the steady state; `None` if the replicas are saturated."""
        low, high = 0.0, self._users.num_users / max(1e-9, self._cycle_s(0.0, replicas))
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._busy_users(middle, replicas) <= self._users.num_users else (low, middle)
        if self._busy_users(low, replicas) < SATURATED * self._users.num_users:
            return None
        return UserLoad(low, max(0.0, self._users.num_users - low * self._users.think_s))

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
        rate = self._users.num_users / self._cycle_s(0.0, 1)
        return UserLoad(rate, max(0.0, self._users.num_users - rate * self._users.think_s))

    def supported(self, requests_per_s: float) -> int:
        """Return the number of users whose requests have this rate on one replica."""
        return int(self._busy_users(requests_per_s, 1)) if requests_per_s > 0 else 0

    def _busy_users(self, rate: float, replicas: int) -> float:
        return rate * self._cycle_s(rate, replicas)

    def _cycle_s(self, rate: float, replicas: int) -> float:
        """Return the mean time of thinking and answer, in seconds; infinite if the rate is above capacity."""
        found = self._mean.predict(self._at(max(rate, 1e-9)), replicas)
        if not (math.isfinite(found.ttft_ms) and math.isfinite(found.tpot_ms)):
            return math.inf
        answer_ms = found.ttft_ms + (self._lengths.output_tokens - 1) * found.tpot_ms
        return self._users.think_s + answer_ms / 1000

    def _at(self, rate: float) -> OfferedLoad:
        return msgspec.structs.replace(self._lengths, requests_per_s=rate)
