"""The policies of other platforms, by name, each with the parameters and defaults of its own documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill_simulator.parameters import ParameterError, read_parameters
from pagemill_simulator.scaling.dynamo import Dynamo
from pagemill_simulator.scaling.fixed import Fixed
from pagemill_simulator.scaling.hpa import Hpa, KedaEpp
from pagemill_simulator.scaling.knative import Knative
from pagemill_simulator.scaling.kubeai import KubeAi
from pagemill_simulator.scaling.rival import Rival
from pagemill_simulator.scaling.wva import Wva, WvaHpa

Kind = type[KubeAi] | type[Hpa] | type[KedaEpp] | type[Wva] | type[WvaHpa] | type[Knative] | type[Dynamo] | type[Fixed]

RIVALS: dict[str, Kind] = {kind.name: kind for kind in (KubeAi, Hpa, KedaEpp, Wva, WvaHpa, Knative, Dynamo, Fixed)}
"""All policies that can be made from parameters alone."""


def make_rival(name: str, parameters: Mapping[str, str] | None = None) -> Rival[Any]:
    """Return the policy by its name and the texts of its parameters. Raise `ParameterError`."""
    kind = RIVALS.get(name)
    if kind is None:
        raise ParameterError(f"there is no policy {name!r}; there are {', '.join(RIVALS)}")
    return read_parameters(kind, parameters or {}, name).policy()
