"""Measures the load of each deployment for the operator (`pagemill_protocol.report.load`). Pure functions.

The load is summed over all engines, and has this gateway's own queue, arrivals and latencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pagemill_protocol.report.load import (
    Arrivals,
    DeploymentLoad,
    EngineReport,
    EnginesLoad,
    EngineStart,
    PodCounts,
    QueueLoad,
)
from pagemill_protocol.report.state import EngineLoad, StepTimeParams, total_counts
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.endpoints.registry import Registry
from pagemill_routing.brain.load.traffic import TrafficMeter
from pagemill_routing.brain.queue.queues import Queues, QueueState

BYTES_PER_TOKEN = 3
"""The assumed bytes per token of waiting bodies, before the model's tokenizer is known."""


def measure_load(
    registry: Registry, queues: Queues, traffic: TrafficMeter, routing_policies: list[str], now: float
) -> list[DeploymentLoad]:
    """Return one entry per deployment. Stale reports do not count."""
    return [
        _of_deployment(deployment, queues.state(deployment.key), traffic, routing_policies, now)
        for deployment in registry.deployments.values()
    ]


def differs_only_in_age(load: DeploymentLoad, published: DeploymentLoad) -> bool:
    """Whether only rates and ages differ, which change constantly."""
    return _without_ages(load) == _without_ages(published)


def _without_ages(load: DeploymentLoad) -> DeploymentLoad:
    return msgspec.structs.replace(
        load,
        engines=msgspec.structs.replace(load.engines, age_s=0.0),
        queue=msgspec.structs.replace(load.queue, oldest_s=None),
        arrivals=Arrivals(),
    )


def _of_deployment(
    deployment: DeploymentRecord, queue: QueueState, traffic: TrafficMeter, routing_policies: list[str], now: float
) -> DeploymentLoad:
    pods = _pods(deployment.records)
    replicas = [_engine_report(record) for record in deployment.records if record.reports.fresh(now)]
    return DeploymentLoad(
        namespace=deployment.model.namespace,
        name=deployment.model.deployment,
        engines=_engines(deployment.records, now),
        pods=pods,
        starts=list(_starts(deployment.records, now)),
        asleep=[record.endpoint.id for record in deployment.records if _is_asleep(record)],
        queue=QueueLoad(
            num_requests=queue.num_requests,
            num_bytes=queue.num_bytes,
            num_tokens=queue.num_tokens or queue.num_bytes // BYTES_PER_TOKEN,
            oldest_s=round(queue.oldest_age_s, 3) if queue.num_requests else None,
            needs_engine=queue.num_requests > 0 and pods.ready + pods.loading == 0,
        ),
        arrivals=traffic.arrivals(deployment.key, busy=queue.num_requests > 0 or _has_requests(deployment)),
        latencies=traffic.latencies(deployment.key),
        lengths=traffic.lengths(deployment.key),
        replicas=replicas,
        unused_settings=_unused_settings(deployment.records),
        routing_policies=[] if deployment.model.routing_policy in routing_policies else routing_policies,
    )


def _unused_settings(records: list[EndpointRecord]) -> list[str]:
    frames = [record.reports.latest for record in records if record.reports.latest is not None]
    return sorted({name for frame in frames for name in frame.unused_settings})


def _has_requests(deployment: DeploymentRecord) -> bool:
    """Whether this gateway has requests at its engines, whose reports may not show them yet."""
    return any(record.in_flight for record in deployment.records)


def _engines(records: list[EndpointRecord], now: float) -> EnginesLoad:
    published = [record for record in records if record.max_model_len > 0 and not _sleeps_idle(record)]
    fresh = [record for record in published if record.reports.fresh(now)]
    frames = [record.reports.latest for record in fresh if record.reports.latest is not None]
    if not frames:
        # No load is a known value if there are no engines, or only engines that were leaving. The load of an engine
        # that has never reported is unknown.
        expected = [record for record in records if not (record.leaving or record.draining or record.sleeping)]
        silent = any(record.max_model_len > 0 for record in expected)
        return EnginesLoad(truth="stale" if silent else "unknown" if expected else "value")
    ages = [age for record in fresh if (age := record.reports.age_s(now)) is not None]
    is_complete = all(record.reports.fresh(now) for record in published if record.usable)
    step_times = _step_times(fresh)
    return EnginesLoad(
        truth="value" if is_complete else "stale",
        age_s=round(max(ages, default=0.0), 3),
        num_reporting=len(frames),
        block_size=min(frame.block_size for frame in frames),
        kinds=tuple(frames[0].kinds),
        max_num_seqs=min(frame.max_num_seqs for frame in frames),
        max_step_tokens=min(frame.max_num_batched_tokens for frame in frames),
        step_time=step_times.usual,
        step_time_ratios=step_times.ratios,
        **total_counts([frame.load for frame in frames]),
    )


def _engine_report(record: EndpointRecord) -> EngineReport:
    latest, adapters = record.reports.latest, [*record.adapters.by_name.values()]
    if latest is None:
        return EngineReport(record.endpoint.id, EngineLoad(), record.in_flight, adapters)
    return EngineReport(record.endpoint.id, latest.load, record.in_flight, adapters, latest.slow_rank)


def _starts(records: list[EndpointRecord], now: float) -> Iterator[EngineStart]:
    for record in records:
        if record.reports.latest is not None and record.reports.latest.start_s and record.reports.fresh(now):
            frame = record.reports.latest
            yield EngineStart(record.endpoint.id, frame.start_s, frame.num_wakes)


class _StepTimes(NamedTuple):
    usual: StepTimeParams
    """The step-time model of the engine that has observed most steps."""
    ratios: tuple[float, ...]
    """The step times of the engines that know theirs, as multiples of the usual ones, in rising order."""


def _step_times(records: list[EndpointRecord]) -> _StepTimes:
    reporting = [(record, frame) for record in records if (frame := record.reports.latest) is not None]
    record, frame = max(reporting, key=lambda each: each[1].step_time.num_steps_observed)
    usual = _step_time_model(record)
    if usual is None:
        return _StepTimes(frame.step_time, ())
    known = [model for each, _ in reporting if (model := _step_time_model(each)) is not None]
    return _StepTimes(frame.step_time, tuple(sorted(round(model.relative_to(usual), 3) for model in known)))


def _step_time_model(record: EndpointRecord) -> StepTimeModel | None:
    report = record.pod_report
    return report.step_time.model if report is not None and report.step_time is not None else None


def _pods(records: list[EndpointRecord]) -> PodCounts:
    leaving = sum(record.leaving or (record.draining and not record.sleeping) for record in records)
    ready = sum(record.usable and record.reports.connected for record in records)
    asleep = sum(_is_asleep(record) for record in records)
    loading = max(0, len(records) - leaving - ready - asleep)
    return PodCounts(loading=loading, ready=ready, leaving=leaving, asleep=asleep)


def _is_asleep(record: EndpointRecord) -> bool:
    """Whether the engine sleeps or is about to, so that it takes no new requests."""
    return record.sleeping and record.reports.connected and not record.leaving


def _sleeps_idle(record: EndpointRecord) -> bool:
    """Whether the engine sleeps and nothing runs on it, so that it is no capacity."""
    state = record.reports.latest
    return record.sleeping and (state is None or not state.load.num_requests)
