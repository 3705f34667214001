"""Builds the settings of the simulated fleet: engine, replica bounds, queue, drain, and the phases of a pod's start."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagemill.planning.choosing import seconds
from pagemill.planning.errors import PlanError
from pagemill.planning.replica import PlannedReplica
from pagemill.up.loading import Loaded
from pagemill_engine.config import EngineConfig
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan
from pagemill_routing.policies.registry import AUTO
from pagemill_simulator.fleet.settings import ColdStart, FleetSettings, FleetSettingsError
from pagemill_simulator.scaling.policy import ReplicaBounds

PHASES = {"schedule": "schedule_s", "pull": "pull_s", "load": "load_s", "warm": "warm_s"}
FORM = "write the total, such as 45s, or its phases, such as schedule=1s,pull=4s,load=30s,warm=5s"


class FleetOptions(NamedTuple):
    """Options that override the file; `None` if not given."""

    min_replicas: int | None
    max_replicas: int | None
    start_replicas: int | None
    cold_start: str | None
    crash_mean: str | None


def bounds_of(loaded: Loaded, options: FleetOptions) -> ReplicaBounds:
    """Return minimum and maximum replicas; without autoscaling both are `spec.replicas`. Raises `PlanError`."""
    section = loaded.deployment.spec.autoscaling
    replicas = loaded.plan.spec_replicas
    low, high = (section.min_replicas, section.max_replicas) if section is not None else (replicas, replicas)
    low = low if options.min_replicas is None else options.min_replicas
    high = high if options.max_replicas is None else options.max_replicas
    if low > high:
        raise PlanError(f"--min-replicas {low} is above --max-replicas {high}: set both options")
    return ReplicaBounds(low, high)


def fleet_of(
    plan: Plan,
    engine: EngineConfig,
    replica: PlannedReplica,
    bounds: ReplicaBounds,
    slo: Slo,
    options: FleetOptions,
    seed: int,
) -> FleetSettings:
    """Return the settings of the deployment's fleet. Raises `PlanError`."""
    defaults = FleetSettings(engine=_engine(engine, replica), bounds=bounds)
    settings = msgspec.structs.replace(
        defaults,
        start_replicas=options.start_replicas,
        routing_policy=defaults.routing_policy if plan.served.routing_policy == AUTO else plan.served.routing_policy,
        slo_ttft_ms=slo.ttft_ms,
        slo_tpot_ms=slo.tpot_ms,
        cold_start=cold_start_of(options.cold_start),
        drain_timeout_s=plan.groups[0].process.drain_timeout_s,
        crash_mean_s=0.0 if options.crash_mean is None else seconds("--crash-mean", options.crash_mean),
        queue=plan.served.queue or defaults.queue,
        seed=seed,
    )
    try:
        return settings.checked()
    except FleetSettingsError as error:
        raise PlanError(str(error)) from None


def cold_start_of(text: str | None) -> ColdStart:
    """Parse a cold start: its phases, or a total that is divided like the defaults. Raises `PlanError`."""
    usual = ColdStart()
    if text is None:
        return usual
    if "=" not in text:
        share = seconds("--cold-start", text) / usual.total_s
        return _replaced(usual, {name: getattr(usual, name) * share for name in PHASES.values()})
    given = {}
    for pair in text.split(","):
        phase, _, duration = (part.strip() for part in pair.partition("="))
        if phase not in PHASES:
            raise PlanError(f"--cold-start {text}: there is no phase {phase!r}; {FORM}")
        given[PHASES[phase]] = seconds(f"--cold-start {phase}", duration)
    return _replaced(usual, given)


def _replaced(usual: ColdStart, given: dict[str, float]) -> ColdStart:
    return msgspec.structs.replace(usual, **given)


def _engine(config: EngineConfig, replica: PlannedReplica) -> EngineConfig:
    """Return the engine's settings with the replica's capacity and step times."""
    shape = replica.shape
    return msgspec.structs.replace(
        config,
        num_kv_blocks=shape.num_blocks,
        simulated_kinds=replica.kinds,
        block_size=shape.block_size,
        max_model_len=replica.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_step_tokens,
        step_time=shape.step_time,
        overlap=replica.overlaps,
        pipeline_parallel_size=shape.step_time.stages,
    )
