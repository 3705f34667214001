"""Finds how much steady traffic of one kind a number of replicas holds within the SLO, by simulating it.

An operator could find this out with load tests of its deployment; it is all that `informed` knows of its engines.
"""

from __future__ import annotations

from statistics import fmean

import msgspec

from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.autoscaler.slo import meets
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.shape import Shape
from pagemill_simulator.bounds.schedule import Schedule
from pagemill_simulator.bounds.trials import Trials
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.request import computed_tokens

HALVINGS = 4
MOST_SIMULATED = 4
"""Largest simulated number of replicas; the capacity of more is extrapolated in proportion, which is nearly right."""
PREDICTED_S = 600.0
"""Seconds of traffic whose mean lengths a prediction uses."""
ROUNDING = 1e-6
SHARE = 0.98
"""Share of the requests that must be within the SLO for a load to count as held."""


def predicted_intensity(kind: Generator, shape: Shape, slo: Slo) -> float:
    """Return what one replica holds by the autoscaler's own prediction; 1.0 if that predicts nothing."""
    requests = kind.steady(1.0, PREDICTED_S).workload(0).requests
    prompt = fmean(each.num_prompt_tokens for each in requests)
    output = fmean(each.num_output_tokens for each in requests)
    computed = fmean(computed_tokens(requests))
    load = OfferedLoad(1.0, prompt, computed, 2 * computed, output)
    held = Predictor(shape, slo.share).highest_rate(load, 1, lambda found: meets(found, slo))
    return PREDICTED_S * held / len(requests) or 1.0


class SteadyCapacity:
    def __init__(
        self,
        kind: Generator,
        settings: FleetSettings,
        slo: Slo,
        *,
        guess: float,
        duration_s: float = 240.0,
        seed: int = 0,
        known: dict[int, float] | None = None,
    ) -> None:
        """Create the capacity of one kind of traffic.

        `guess` is what one replica might hold, within a factor of two. `duration_s` is the length of each simulation.
        `known`
        has earlier results by number of replicas; new ones are added to it.
        """
        self._kind = kind
        self._settings = settings
        self._slo = slo
        self._guess = guess
        self._duration_s = duration_s
        self._seed = seed
        self._held = {} if known is None else known

    def held(self, replicas: int) -> float:
        """Return the intensity that so many replicas hold; values between simulated numbers are interpolated."""
        if replicas <= 0:
            return 0.0
        if replicas > MOST_SIMULATED:
            return self.held(MOST_SIMULATED) * replicas / MOST_SIMULATED
        lower = 1 << (replicas.bit_length() - 1)
        if lower == replicas:
            return self._power_of_two(replicas)
        low, high = self._power_of_two(lower), self._power_of_two(2 * lower)
        return low + (high - low) * (replicas - lower) / lower

    def needed(self, intensity: float) -> int:
        """Return the fewest replicas that hold the intensity, within the bounds."""
        low, high = self._settings.bounds
        if intensity <= 0:
            return low
        return next((each for each in range(max(1, low), high) if self.held(each) >= intensity), high)

    def _power_of_two(self, replicas: int) -> float:
        if replicas not in self._held:
            self._held[replicas] = self._find(replicas)
        return self._held[replicas]

    def _find(self, replicas: int) -> float:
        """Search by bisection, starting from what half as many replicas hold each."""
        each = self._power_of_two(replicas // 2) / (replicas // 2) if replicas > 1 else self._guess
        low, high = (1.0, 1.5) if replicas > 1 else (0.25, 2.0)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._holds(replicas, middle * each * replicas) else (low, middle)
        return low * each * replicas

    def _holds(self, replicas: int, intensity: float) -> bool:
        settings = msgspec.structs.replace(
            self._settings, bounds=ReplicaBounds(replicas, replicas), start_replicas=replicas, crash_mean_s=0.0
        )
        workload = self._kind.steady(intensity, self._duration_s).workload(self._seed)
        trials = Trials("steady", workload, settings, self._slo)
        return trials.misses_at_most(Schedule.constant(replicas), (1 - SHARE) * len(workload.requests) + ROUNDING)
