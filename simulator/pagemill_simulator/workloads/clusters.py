"""Requests in clusters, like an editor's code completions: long prompts, short answers, nearly simultaneous.

Clusters begin independently of each other; each has its requests within seconds. In `shapes`, every request comes
independently of the others.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

import msgspec

from pagemill_simulator.parameters import Count, Factor, Positive, Share, Sigma
from pagemill_simulator.workloads.arrivals import poisson
from pagemill_simulator.workloads.shapes import Steady


class Clusters(Steady, frozen=True, kw_only=True):
    """Clusters of long prompts and short answers."""

    name: ClassVar[str] = "clusters"
    rate: Positive = 0.5
    """Requests per second, mean over all of the time."""
    cluster_requests: Factor = 25.0
    """Requests of a cluster, mean; their number is drawn from a geometric distribution."""
    cluster_s: Positive = 5.0
    """Seconds within which a cluster's requests arrive."""
    alone: Share = 0.3
    """Share of all requests that belong to no cluster."""
    duration_s: Positive = 3600.0
    """Seconds of offered traffic."""
    prompt_tokens: Positive = 4000.0
    prompt_sigma: Sigma = 0.35
    longest_prompt: Count = 7000
    output_tokens: Positive = 20.0
    output_sigma: Sigma = 0.35
    longest_output: Count = 30

    def steady(self, intensity: float, duration_s: float) -> Clusters:
        return msgspec.structs.replace(self, rate=intensity, duration_s=duration_s)

    def arrivals(self, times: random.Random) -> list[float]:
        return sorted([*self._alone(times), *self._clustered(times)])

    def _alone(self, times: random.Random) -> list[float]:
        rate = self.alone * self.rate
        return list(poisson(times, lambda at_s: rate, most=rate, duration_s=self.duration_s))

    def _clustered(self, times: random.Random) -> list[float]:
        rate = (1 - self.alone) * self.rate / self.cluster_requests
        begins = poisson(times, lambda at_s: rate, most=rate, duration_s=self.duration_s)
        found = (
            begin_s + times.random() * self.cluster_s for begin_s in begins for _ in range(self._cluster_size(times))
        )
        return [at_s for at_s in found if at_s < self.duration_s]

    def _cluster_size(self, times: random.Random) -> int:
        """Draw from a geometric distribution, at least 1."""
        if self.cluster_requests <= 1:
            return 1
        return 1 + math.floor(math.log(1 - times.random()) / math.log(1 - 1 / self.cluster_requests))
