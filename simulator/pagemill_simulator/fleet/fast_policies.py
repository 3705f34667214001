"""What the gateway's own code is asked in a fleet in fast-forward: a pod as it sees one, and choices by any policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_gateway.routing.policy import Candidate, RequestView, RoutingPolicy
from pagemill_gateway.routing.report import PodReport
from pagemill_gateway.routing.step_time_snapshot import take_snapshot
from pagemill_protocol.state import EngineLoad
from pagemill_protocol.step_time import StepTimeModel
from pagemill_simulator.fleet.fast_pod import PodLoad


def choose_by(
    policy: RoutingPolicy, view: RequestView, candidates: Mapping[int, Candidate], fits: Callable[[int], bool]
) -> int | None:
    """The slot that `policy` chooses, of those with room if that one has none; None: there is no room."""
    if not candidates:
        return None
    slot = _chosen(policy, view, candidates, list(candidates))
    if fits(slot):
        return slot
    roomy = [each for each in candidates if fits(each)]
    return _chosen(policy, view, candidates, roomy) if roomy else None


def report_of(load: PodLoad, limits: SchedulerLimits, model: StepTimeModel) -> PodReport:
    return PodReport(
        block_size=limits.block_size,
        max_step_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_tokens_running=load.num_tokens_running,
        num_tokens_waiting=load.num_tokens_waiting,
        num_blocks_total=limits.num_blocks,
        num_blocks_available=load.num_blocks_available,
        num_blocks_active=load.num_blocks_active,
        step_time=take_snapshot(model, limits.max_num_batched_tokens, load.num_running, load.num_tokens_running),
    )


def load_of(load: PodLoad, limits: SchedulerLimits) -> EngineLoad:
    """As an engine reports it."""
    return EngineLoad(
        num_blocks_total=limits.num_blocks,
        num_blocks_free=load.num_blocks_available,
        num_blocks_active=load.num_blocks_active,
        num_requests_running=load.num_running,
        num_requests_waiting=load.num_waiting,
        num_tokens_running=load.num_tokens_running,
        num_tokens_waiting=load.num_tokens_waiting,
    )


def _chosen(policy: RoutingPolicy, view: RequestView, candidates: Mapping[int, Candidate], slots: Sequence[int]) -> int:
    among = [candidates[slot] for slot in slots]
    chosen = policy.choose(view, among).chosen
    return next(slot for slot, each in zip(slots, among, strict=True) if each is chosen)
