"""Creates the requested scaling policies by name: the deployment's own, other registered ones, and rivals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pagemill.planning.errors import PlanError
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.registry import UnknownPolicyError, registered
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo, settings_of, with_default_targets
from pagemill_protocol.report.shape import Shape
from pagemill_simulator.bounds.capacity import SteadyCapacity, predicted_intensity
from pagemill_simulator.bounds.clairvoyant import search
from pagemill_simulator.bounds.informed import Informed
from pagemill_simulator.bounds.schedule import ScheduledReplicas
from pagemill_simulator.bounds.trials import Trials
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.scaling.dynamo import Dynamo
from pagemill_simulator.scaling.policy import FleetScaler, ReplicaBounds
from pagemill_simulator.scaling.rivals import RIVALS, make_rival
from pagemill_simulator.scaling.simulated import own, rival
from pagemill_simulator.workloads.generator import Generator
from pagemill_simulator.workloads.request import Workload

OWN = "pagemill"
BOUND = "clairvoyant"
"""The policy that knows all requests in advance and searches for the best schedule in the simulation."""


class Offered(NamedTuple):
    """The workload and the replica that some policies need to know."""

    workload: Workload
    generator: Generator | None
    """The workload's generator; `None` if the workload was recorded."""
    shape: Shape
    """The autoscaler's description of a replica."""


def policies_of(
    names: Sequence[str],
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    offered: Offered,
) -> list[FleetScaler]:
    """Return the policies; each has its own memory. Raises `PlanError`."""
    policies = []
    for name in names or [OWN]:
        try:
            policies.append(_policy(name, section, settings, slo, offered))
        except (ParameterError, UnknownPolicyError) as error:
            raise PlanError(f"--policy {error}") from None
    return policies


def _policy(
    choice: str,
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    offered: Offered,
) -> FleetScaler:
    name, parameters = split_choice(choice)
    if name in RIVALS:
        return rival(
            make_rival(name, {**(_slo_parameters(slo) if name == Dynamo.name else {}), **parameters}), settings.bounds
        )
    names = registered().policies
    bounds = Informed.name, BOUND
    if name not in (OWN, *bounds, *names):
        raise ParameterError(f"{name!r}: is not a policy; choose one of {', '.join([OWN, *names, *RIVALS, *bounds])}")
    if parameters:
        raise ParameterError(f"{choice}: {name} has no parameters; use spec.autoscaling, --ttft and --tpot")
    if name == OWN:
        return own(own_settings(section, settings.bounds, slo), name=OWN)
    if name in names:
        aims = msgspec.structs.replace(own_settings(section, settings.bounds, slo), policy=name)
        return own(aims, name=name)
    if name == Informed.name:
        return _informed(settings, slo, offered)
    best = search(Trials(name, offered.workload, settings, slo))
    return ScheduledReplicas(name, best.schedule)


def _informed(settings: FleetSettings, slo: Slo, offered: Offered) -> Informed:
    traffic = offered.generator
    if traffic is None:
        raise ParameterError(
            f"{Informed.name}: needs the rate of generated traffic, which a trace does not have; use --workload"
        )
    guess = predicted_intensity(traffic, offered.shape, slo)
    capacity = SteadyCapacity(traffic, settings, slo, guess=guess, seed=settings.seed + 1)
    return Informed(traffic, capacity, settings.cold_start.total_s, settings.bounds.max_replicas)


def _slo_parameters(slo: Slo) -> dict[str, str]:
    """Return the SLO as parameters of the rival that has one."""
    aims = {"ttft_ms": slo.ttft_ms, "itl_ms": slo.tpot_ms}
    return {name: str(limit_ms) for name, limit_ms in aims.items() if limit_ms is not None}


def own_slo(section: AutoscalingSection | None) -> Slo | None:
    """Return the SLO of the file; `None` if it has none."""
    settings = _active(section)
    return settings.slo if settings is not None else None


def own_settings(section: AutoscalingSection | None, bounds: ReplicaBounds, slo: Slo) -> ScalingSettings:
    """Return the operator's settings for the file, bounds and SLO, in mode Active whatever the file's mode is."""
    low, high = bounds
    aim = slo if slo.ttft_ms is not None or slo.tpot_ms is not None else None
    settings = _active(section) or ScalingSettings("Active", low, high, learns_idle_s=True)
    settings = msgspec.structs.replace(settings, min_replicas=low, max_replicas=high, slo=aim)
    return settings if aim is not None else with_default_targets(settings)


def _active(section: AutoscalingSection | None) -> ScalingSettings | None:
    return settings_of(section.model_copy(update={"mode": "Active"})) if section is not None else None
