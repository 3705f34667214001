"""The workload generators by name."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill_simulator.parameters import ParameterError, read_parameters
from pagemill_simulator.workloads.agentic import Agentic
from pagemill_simulator.workloads.batches import BesideBatch
from pagemill_simulator.workloads.clusters import Clusters
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.patterns import FlashCrowd, Retrieval, SilentNights, Weekly
from pagemill_simulator.workloads.shapes import Burst, Diurnal, Ramp, Sine, Steady, Step

GENERATORS: dict[str, type[Generator]] = {
    kind.name: kind
    for kind in (
        Steady,
        Ramp,
        Step,
        Burst,
        Sine,
        Diurnal,
        Weekly,
        SilentNights,
        FlashCrowd,
        Clusters,
        Retrieval,
        Agentic,
        BesideBatch,
    )
}


def make_generator(name: str, parameters: Mapping[str, str] | None = None) -> Generator:
    """Return the generator by its name and the texts of its parameters. Raise `ParameterError`."""
    kind = GENERATORS.get(name)
    if kind is None:
        raise ParameterError(f"there is no workload {name!r}; there are {', '.join(GENERATORS)}, and files of traces")
    return read_parameters(kind, parameters or {}, name)
