"""What a fast fleet's gateway reports to the autoscaler: as `pagemill_gateway.brain.load.measure`, from counters."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_protocol.load import DeploymentLoad, EngineHeld, EnginesLoad, PodsSeen, QueueLoad
from pagemill_simulator.fleet.fast_course import Site
from pagemill_simulator.fleet.fast_gateway import DEPLOYMENT, FastGateway
from pagemill_simulator.fleet.fast_steps import StepTimes
from pagemill_simulator.fleet.platform import Pod


def deployment_load(
    gateway: FastGateway, pods: Mapping[str, Pod], limits: SchedulerLimits, steps: StepTimes, now_s: float
) -> DeploymentLoad:
    """`pods`: all that the platform has, by name."""
    seen = _pods(gateway, pods)
    queue = _queue(gateway, seen, now_s)
    busy = queue.num_requests > 0 or any(site.courses for site in gateway.sites.values())
    return DeploymentLoad(
        namespace="",
        name=DEPLOYMENT,
        engines=_engines(gateway, limits, steps),
        pods=seen,
        held=[held_by(site) for site in gateway.sites.values()],
        queue=queue,
        arrivals=gateway.traffic.arrivals(DEPLOYMENT, busy=busy),
        latencies=gateway.traffic.latencies(DEPLOYMENT),
        lengths=gateway.traffic.lengths(DEPLOYMENT),
    )


def held_by(site: Site) -> EngineHeld:
    load = site.pod.report()
    return EngineHeld(site.name, load.num_blocks_active, max(load.num_running + load.num_waiting, len(site.courses)))


def _pods(gateway: FastGateway, pods: Mapping[str, Pod]) -> PodsSeen:
    listed = [pod for pod in pods.values() if pod.has_address]
    leaving = sum(pod.phase == "draining" for pod in listed)
    ready = sum(pod.phase == "ready" and pod.name in gateway.sites for pod in listed)
    return PodsSeen(loading=len(listed) - leaving - ready, ready=ready, leaving=leaving)


def _queue(gateway: FastGateway, pods: PodsSeen, now_s: float) -> QueueLoad:
    queue, oldest_s = gateway.queue, gateway.queue.oldest_arrival()
    return QueueLoad(
        num_requests=len(queue),
        num_bytes=queue.num_bytes,
        num_tokens=queue.num_tokens,
        oldest_s=None if oldest_s is None else round(max(0.0, now_s - oldest_s), 3),
        needs_engine=len(queue) > 0 and pods.ready + pods.loading == 0,
    )


def _engines(gateway: FastGateway, limits: SchedulerLimits, steps: StepTimes) -> EnginesLoad:
    pods = [site.pod for site in gateway.sites.values()]
    if not pods:
        return EnginesLoad(truth="value")
    loads = [pod.report() for pod in pods]
    num_steps = max(pod.num_steps for pod in pods)
    return EnginesLoad(
        truth="value",
        num_reporting=len(pods),
        num_blocks_total=limits.num_blocks * len(pods),
        num_blocks_active=sum(load.num_blocks_active for load in loads),
        num_requests_running=sum(load.num_running for load in loads),
        num_requests_waiting=sum(load.num_waiting for load in loads),
        num_tokens_running=sum(load.num_tokens_running for load in loads),
        num_tokens_waiting=sum(load.num_tokens_waiting for load in loads),
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_num_batched_tokens,
        step_time=msgspec.structs.replace(steps.model.params(), num_steps_observed=num_steps),
    )
