"""People in place of a rate: each asks, reads the answer, thinks, and asks again.

Little's law for a closed system (the interactive response time law): with N users who think for Z seconds,
N = X (Z + R), where X is the rate of their requests and R the mean time of an answer, which grows with X. They never
ask faster than replicas answer: users who wait do not ask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill.planning.replica import Replica
from pagemill_operator.autoscaler.prediction import OfferedLoad, Predictor
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import weigh

MEAN = 0.5
"""The share at which the autoscaler's prediction adds no spread to the mean."""
ROUNDS = 60
SATURATED = 0.98
"""Where fewer of the users than this share are accounted for, the others wait for a replica."""


class Users(NamedTuple):
    num_users: int
    think_s: float
    """From the end of an answer to the next request."""


class Asking(NamedTuple):
    """What the users do together."""

    requests_per_s: float
    answering: float
    """Users who wait for the end of an answer, on average; the others think."""


class Cycles:
    """Users of one kind on replicas of one kind."""

    def __init__(self, replica: Replica, lengths: OfferedLoad, users: Users) -> None:
        self._mean = Predictor(replica.shape, MEAN)
        self._shape = replica.shape
        self._lengths = lengths
        self._users = users

    def asking(self, replicas: int) -> Asking | None:
        """In the steady state; `None`: so few replicas are saturated, and users queue without end."""
        low, high = 0.0, self._users.num_users / max(1e-9, self._cycle_s(0.0, replicas))
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._busy_users(middle, replicas) <= self._users.num_users else (low, middle)
        if self._busy_users(low, replicas) < SATURATED * self._users.num_users:
            return None
        return Asking(low, max(0.0, self._users.num_users - low * self._users.think_s))

    def fewest(self, slo: Slo, most: int) -> tuple[int, Asking] | None:
        """The smallest number of replicas that keeps the SLO while they ask; `None`: no number up to `most` does."""
        predictor = Predictor(self._shape, slo.share)
        low, high = 1, most + 1
        found: Asking | None = None
        while low < high:
            middle = (low + high) // 2
            asking = self.asking(middle)
            if asking is not None and weigh(predictor, self._at(asking.requests_per_s), slo, middle).meets:
                high, found = middle, asking
            else:
                low = middle + 1
        return None if found is None else (low, found)

    def at_most(self) -> Asking:
        """If every answer took as long as that of a user alone."""
        rate = self._users.num_users / self._cycle_s(0.0, 1)
        return Asking(rate, max(0.0, self._users.num_users - rate * self._users.think_s))

    def supported(self, requests_per_s: float) -> int:
        """How many such users ask at this rate of one replica."""
        return int(self._busy_users(requests_per_s, 1)) if requests_per_s > 0 else 0

    def _busy_users(self, rate: float, replicas: int) -> float:
        return rate * self._cycle_s(rate, replicas)

    def _cycle_s(self, rate: float, replicas: int) -> float:
        """Think time and answer, on average; infinite where the rate is too high."""
        found = self._mean.predict(self._at(max(rate, 1e-9)), replicas)
        if not (math.isfinite(found.ttft_ms) and math.isfinite(found.tpot_ms)):
            return math.inf
        answer_ms = found.ttft_ms + (self._lengths.output_tokens - 1) * found.tpot_ms
        return self._users.think_s + answer_ms / 1000

    def _at(self, rate: float) -> OfferedLoad:
        return msgspec.structs.replace(self._lengths, requests_per_s=rate)
