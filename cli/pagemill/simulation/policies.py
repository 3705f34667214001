"""The scaling policies that are asked for, by name: the deployment's own, other registered ones, and rivals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagemill.planning.errors import PlanError
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.registry import UnknownPolicyError, registered
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo, settings_of, with_default_targets
from pagemill_simulator.bounds.clairvoyant import search
from pagemill_simulator.bounds.schedule import ScheduledReplicas
from pagemill_simulator.bounds.trials import Trials
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.scaling.dynamo import Dynamo
from pagemill_simulator.scaling.policy import Bounds, FleetScaler
from pagemill_simulator.scaling.rivals import RIVALS, make_rival
from pagemill_simulator.scaling.simulated import own, rival
from pagemill_simulator.workloads.request import Workload

OWN = "pagemill"
BOUND = "clairvoyant"
"""It knows all requests ahead, and searches schedules in the simulation."""


def policies_of(
    names: Sequence[str],
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    workload: Workload,
) -> list[FleetScaler]:
    """Each with a memory of its own. Raises `PlanError`."""
    policies = []
    for name in names or [OWN]:
        try:
            policies.append(_policy(name, section, settings, slo, workload))
        except (ParameterError, UnknownPolicyError) as error:
            raise PlanError(f"--policy {error}") from None
    return policies


def _policy(
    choice: str,
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    workload: Workload,
) -> FleetScaler:
    name, parameters = split_choice(choice)
    if name in RIVALS:
        return rival(make_rival(name, {**(_aims(slo) if name == Dynamo.name else {}), **parameters}), settings.bounds)
    names = registered().policies
    if name not in (OWN, BOUND, *names):
        raise ParameterError(f"{name!r}: there is none such; there are {', '.join([OWN, *names, *RIVALS, BOUND])}")
    if parameters:
        raise ParameterError(f"{choice}: {name} has no parameters; spec.autoscaling and --ttft, --tpot are its own")
    if name == OWN:
        return own(own_settings(section, settings.bounds, slo), name=OWN)
    if name in names:
        aims = msgspec.structs.replace(own_settings(section, settings.bounds, slo), policy=name)
        return own(aims, name=name)
    best = search(Trials(name, workload, settings, slo))
    return ScheduledReplicas(name, best.schedule)


def _aims(slo: Slo) -> dict[str, str]:
    """As the rival that goes by an SLO too names them."""
    aims = {"ttft_ms": slo.ttft_ms, "itl_ms": slo.tpot_ms}
    return {name: str(limit_ms) for name, limit_ms in aims.items() if limit_ms is not None}


def own_slo(section: AutoscalingSection | None) -> Slo | None:
    """The file's."""
    settings = _active(section)
    return settings.slo if settings is not None else None


def own_settings(section: AutoscalingSection | None, bounds: Bounds, slo: Slo) -> ScalingSettings:
    """As the operator would have them, and deciding, whatever mode the file has."""
    low, high = bounds
    aim = slo if slo.ttft_ms is not None or slo.tpot_ms is not None else None
    settings = _active(section) or ScalingSettings("Active", low, high)
    settings = msgspec.structs.replace(settings, min_replicas=low, max_replicas=high, slo=aim)
    return settings if aim is not None else with_default_targets(settings)


def _active(section: AutoscalingSection | None) -> ScalingSettings | None:
    return settings_of(section.model_copy(update={"mode": "Active"})) if section is not None else None
