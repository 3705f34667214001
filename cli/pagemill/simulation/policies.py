"""The scaling policies that are asked for, by name: the deployment's own, and those of other platforms."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagemill.planning.errors import PlanError
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.memory import Shape
from pagemill_operator.autoscaler.policy import Policy, Slo, policy_of, with_default_targets
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.scaling.clairvoyant import Clairvoyant
from pagemill_simulator.scaling.dynamo import Dynamo
from pagemill_simulator.scaling.pagemill import PagemillPolicy
from pagemill_simulator.scaling.policy import Bounds, ScalingPolicy
from pagemill_simulator.scaling.rivals import RIVALS, make_rival
from pagemill_simulator.workloads.request import Workload

OWN = "pagemill"
FLOOR = Clairvoyant.name


def policies_of(
    names: Sequence[str],
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    workload: Workload,
    shape: Shape,
) -> list[ScalingPolicy]:
    """Each with a memory of its own. Raises `PlanError`."""
    policies = []
    for name in names or [OWN]:
        try:
            policies.append(_policy(name, section, settings, slo, workload, shape))
        except ParameterError as error:
            raise PlanError(f"--policy {error}") from None
    return policies


def _policy(
    choice: str,
    section: AutoscalingSection | None,
    settings: FleetSettings,
    slo: Slo,
    workload: Workload,
    shape: Shape,
) -> ScalingPolicy:
    name, parameters = split_choice(choice)
    if name in RIVALS:
        return make_rival(name, settings.bounds, {**(_aims(slo) if name == Dynamo.name else {}), **parameters})
    if name not in (OWN, FLOOR):
        raise ParameterError(f"{name!r}: there is none such; there are {', '.join([OWN, *RIVALS, FLOOR])}")
    if parameters:
        raise ParameterError(f"{choice}: {name} has no parameters; spec.autoscaling and --ttft, --tpot are its own")
    if name == OWN:
        return PagemillPolicy(own_policy(section, settings.bounds, slo))
    try:
        return Clairvoyant(settings.bounds, workload, cold_start_s=settings.cold_start.total_s, shape=shape, slo=slo)
    except ValueError as error:
        raise ParameterError(f"{name}: {error}") from None


def _aims(slo: Slo) -> dict[str, str]:
    """In the words of the rival that goes by an SLO too."""
    aims = {"ttft_ms": slo.ttft_ms, "itl_ms": slo.tpot_ms}
    return {name: str(limit_ms) for name, limit_ms in aims.items() if limit_ms is not None}


def own_slo(section: AutoscalingSection | None) -> Slo | None:
    """The file's."""
    policy = _active(section)
    return policy.slo if policy is not None else None


def own_policy(section: AutoscalingSection | None, bounds: Bounds, slo: Slo) -> Policy:
    """As the operator would have it, and deciding, whatever mode the file has."""
    low, high = bounds
    aim = slo if slo.ttft_ms is not None or slo.tpot_ms is not None else None
    policy = _active(section) or Policy("Active", low, high)
    policy = msgspec.structs.replace(policy, min_replicas=low, max_replicas=high, slo=aim)
    return policy if aim is not None else with_default_targets(policy)


def _active(section: AutoscalingSection | None) -> Policy | None:
    return policy_of(section.model_copy(update={"mode": "Active"})) if section is not None else None
