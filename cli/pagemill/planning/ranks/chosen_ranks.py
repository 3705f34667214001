"""Chooses how many devices share a model that does not fit on one: `tensorParallel` and `pipelineParallel`.

All numbers are planned under the load; those with the fewest devices in all that meet the SLO are chosen, or the fewest
that hold the model if none does. `answering` asks for it; the plans are `replica`'s and `forecast`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagemill.planning.accelerators import DEVICES_PER_NODE
from pagemill.planning.errors import PlanError
from pagemill.planning.forecast import Forecast
from pagemill.planning.replica import Division, PlannedReplica

IN_A_NODE = (Division(2, 1), Division(4, 1), Division(DEVICES_PER_NODE, 1))
SEVERAL_NODES = tuple(Division(DEVICES_PER_NODE, stages) for stages in (2, 3, 4))
"""Stages of whole nodes: sums over ranks do not pass the network."""


class Considered(NamedTuple):
    ranks: Division
    replica: PlannedReplica | None
    forecast: Forecast | None
    error: str = ""
    """Why these cannot serve the model."""

    @property
    def devices(self) -> int | None:
        """The devices of all replicas; None if no number of replicas meets the SLO."""
        needed = None if self.forecast is None else self.forecast.needed
        return None if needed is None else needed * self.ranks.size

    def __str__(self) -> str:
        if self.forecast is None:
            return f"{self.ranks} does not ({self.error})"
        fits = f"{self.ranks} holds {self.forecast.at_once} such requests"
        if self.devices is None:
            return f"{fits} and misses the SLO"
        return f"{fits} and needs {self.devices} devices"


class ChosenRanks(NamedTuple):
    chosen: Considered
    considered: list[Considered]
    too_large: str
    """Why one device is not enough."""

    @property
    def reason(self) -> str:
        all_numbers = "; ".join(map(str, self.considered))
        least = "the fewest devices that hold the model" if self.chosen.devices is None else "the fewest devices"
        return f"{self.chosen.ranks} is chosen, {least}: {all_numbers}. On one device: {self.too_large}"


Planned = Callable[[tuple[Division, ...]], Mapping[Division, PlannedReplica | PlanError]]


def choose_ranks(planned: Planned, weigh: Callable[[PlannedReplica], Forecast], too_large: PlanError) -> ChosenRanks:
    """Return the choice. `planned`: returns the replica of each number of ranks. Raises `too_large` if none holds the
    model."""
    considered: list[Considered] = []
    for numbers in (IN_A_NODE, SEVERAL_NODES):
        for ranks, found in planned(numbers).items():
            if isinstance(found, PlanError):
                considered.append(Considered(ranks, None, None, str(found).partition(". ")[0]))
            else:
                considered.append(Considered(ranks, found, weigh(found)))
        if fitting := [each for each in considered if each.forecast is not None]:
            best = min(fitting, key=lambda each: (each.devices is None, each.devices or 0, each.ranks.size))
            return ChosenRanks(best, considered, str(too_large))
    reasons = "; ".join(map(str, considered))
    raise PlanError(f"{too_large} Several devices cannot serve it either: {reasons}.")
