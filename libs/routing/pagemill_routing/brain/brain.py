"""The brain: chooses an endpoint for each request, and counts the choice.

It has no HTTP. `relay` calls it through `brain.interface`, and it calls the policies of `routing`. Discovery passes the
catalogue and the engines' reports to its `observer` (`brain.observing`); status and metrics ask its `reader`
(`brain.reading`). Clock and random numbers are arguments, so that a simulation can replay its decisions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import msgspec

from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord, has_capacity, is_idle
from pagemill_routing.brain.endpoints.registry import Registry
from pagemill_routing.brain.interface import (
    DEFAULT_TICKET,
    MAX_REROUTES,
    NOT_READY,
    UNSERVED_FAILURES,
    Assignment,
    CompletedRequest,
    FailureKind,
    Liveness,
    Probe,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    ServedName,
    Target,
)
from pagemill_routing.brain.load.traffic import TrafficMeter
from pagemill_routing.brain.observing import Observer
from pagemill_routing.brain.placement.eligible import Eligible
from pagemill_routing.brain.placement.placement import Placement, PlacementResult
from pagemill_routing.brain.placement.requests import InFlightRequest, PlacementRequest, make_placement_request
from pagemill_routing.brain.queue.outage import Outage, Outages
from pagemill_routing.brain.queue.queues import Queues
from pagemill_routing.brain.reading import Reader
from pagemill_routing.brain.resilience.poison_memory import PoisonMemory
from pagemill_routing.brain.resilience.poison_requests import PoisonDetection
from pagemill_routing.brain.resilience.recovery import Recovery
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.registry import RoutingPolicies

STALL_STEPS = 4
"""An engine is stuck if its step takes longer than this many times its predicted duration. On a busy machine, the worst
of 178 steps took 4.0 times as long, and the worst step of more than a second 2.6 times (docs/benchmarks.md)."""


class LocalBrain:
    """The implementation of `brain.interface.Brain` in this process."""

    def __init__(
        self,
        config: RoutingConfig,
        *,
        keeps_terminating: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        first_decision: int = 0,
        generated_token: Callable[[str], str] = lambda control_url: "",
    ) -> None:
        """`keeps_terminating`: whether terminating endpoints get requests while no other one can take over. A cluster
        sets `terminating` at once, when the gateway may not know the replacement yet; a static catalogue sets it when
        the endpoint must get no more requests. `generated_token` returns the token that the engine at a control URL
        generated; empty if unknown."""
        self._clock = clock
        rng = rng or random.Random()
        self._policies = RoutingPolicies(config.routing_policy, config.routing_session_ms)
        self._open: dict[int, InFlightRequest] = {}
        self._stall_timeout_s = config.stall_timeout_s
        self._freeze_timeout_s = config.freeze_timeout_s
        self.registry = Registry(stale_after_s=config.state_stale_after_s, generated_token=generated_token)
        self.placement = Placement(rng, config.decision_log_size, first_decision)
        self.traffic = TrafficMeter(clock)
        self._outages = Outages(self.registry, config.queue, config.outage_wait_s, clock)
        self.queues = Queues(clock, self._outages.is_serving, self._outages.start_left_s, self._outages.waits_until)
        self.recovery = Recovery(
            ejection_base_s=config.ejection_base_s,
            ejection_max_s=config.ejection_max_s,
            max_ejected_share=config.max_ejected_share,
            retry_share=config.retry_share,
        )
        self.poison_detection = PoisonDetection()
        self.poison_memory = PoisonMemory()
        self._eligible = Eligible(
            self.registry, self.recovery, self.poison_detection, rng, clock, keeps_terminating=keeps_terminating
        )
        parts = (self.registry, self.placement, self.queues, self.recovery, self.poison_detection, self.traffic, clock)
        self.observer = Observer(*parts, keeps_terminating=keeps_terminating)
        self.reader = Reader(*parts, self._policies.names)

    def resolve(self, model: str) -> Target:
        """Return the target like `look_up`, without a coroutine."""
        return self._eligible.resolve(model)

    async def look_up(self, model: str) -> Target:
        return self.resolve(model)

    async def names(self) -> list[ServedName]:
        return [self.registry.served(name) for name in self.registry.names()]

    async def find(self, model: str, ticket: QueueTicket = DEFAULT_TICKET) -> Target:
        try:
            return self.resolve(model)
        except PagemillError as error:
            if error.code != NOT_READY:
                raise
        self._outages.note_demand(self._outages.wanted(model))
        left_s = self._outages.waits_left_s(model)
        if max(left_s.values(), default=0.0) <= 0:
            return self.resolve(model)
        key = max(left_s, key=lambda each: left_s[each])
        self.traffic.arrived(key, 0, ticket.arrived_at)
        attempt = partial(self._resolve_in_time, model, self._clock() + left_s[key])
        target, queued_s = await self.queues.wait(
            key, self._outages.limits(key), ticket, attempt, group=f"find {model}", cost_tokens=0, undo=_nothing
        )
        return target._replace(queued_s=queued_s)

    async def choose(
        self,
        target: Target,
        tried: frozenset[str],
        request: RoutingRequest,
        *,
        ticket: QueueTicket = DEFAULT_TICKET,
        retry: RetryContext | None = None,
    ) -> Assignment:
        key = target.deployment
        failed_at = self.registry.endpoints.get(retry.endpoint_id) if retry is not None else None
        self.recovery.admit(key, ticket.key, retry, failed_at, self._clock())
        probe = self._next_probe(key, retry) if retry is not None else "none"
        to_place = make_placement_request(
            self.registry.deployments.get(key), target, tried, request, ticket, retry, probe
        )
        outage = Outage()
        if retry is None and not (ticket.paid or ticket.num_refusals or tried or ticket.is_low_priority):
            num_new = 0 if target.queued_s else 1
            self.traffic.arrived(key, request.num_prompt_tokens, ticket.arrived_at, num_new)
        if ticket.num_refusals <= MAX_REROUTES and self.queues.is_empty(key):
            assignment = self._place(to_place, outage)
            if assignment is not None:
                return assignment
        cost_tokens = self._cost_of_turn(to_place)
        attempt: Callable[[], Assignment | None] = partial(
            self._place, msgspec.structs.replace(to_place, charged_tokens=cost_tokens), outage
        )
        placed, queued_s = await self.queues.wait(
            key,
            self._outages.limits(key),
            msgspec.structs.replace(ticket, key=to_place.queue_key),
            attempt,
            group=to_place.group,
            cost_tokens=cost_tokens,
            undo=self.withdrawn,
            kept=retry is not None
            and (retry.kind not in UNSERVED_FAILURES or bool(retry.engine_failures) or retry.num_tokens > 0),
        )
        return msgspec.structs.replace(placed, queued_s=queued_s)

    def _next_probe(self, deployment: str, retry: RetryContext) -> Probe:
        try:
            return self.poison_detection.next_probe(deployment, retry.engine_failures)
        except PagemillError:
            failed_at = self.registry.endpoints.get(retry.endpoint_id)
            if retry.content:
                self.poison_memory.remember(retry.content, failed_at.weights_digest if failed_at is not None else "")
            raise

    async def idle_capacity(self, model: str, max_load: float) -> int:
        deployments, now = self.registry.named(model), self._clock()
        if not deployments:
            return 1  # A request for an unknown model is refused at once.
        if not all(self.queues.is_empty(each.key) for each in deployments):
            return 0
        # At most one for each engine, because a live request would wait for the prompts of all that share its step.
        return sum(is_idle(record, max_load, now) for each in deployments for record in each.records)

    def accepted(self, assignment: Assignment) -> None:
        sent = self._open.get(assignment.decision)
        if sent is not None:
            sent.record.refusal_backoff.accepted()
            sent.record.reserved.accepted(assignment.decision)

    def started(self, assignment: Assignment, ttft_ms: float | None = None) -> None:
        sent = self._open.get(assignment.decision)
        if sent is None:
            return
        self.recovery.ejection(sent.record).answered(assignment.decision)
        self.placement.computed(assignment.decision, sent.record, self._clock(), ttft_ms)
        if self.poison_detection.cleared(assignment.decision):
            self.queues.pump(sent.record.deployment)

    def freed(self, assignment: Assignment) -> None:
        sent = self._open.get(assignment.decision)
        if sent is not None and not sent.is_freed:
            self.started(assignment)  # its first frame may wait, too
            self._open[assignment.decision] = msgspec.structs.replace(sent, is_freed=True)
            self._leave(assignment.decision, sent.record, failed=False)
            self.queues.pump(sent.record.deployment)

    async def liveness(self, endpoint_id: str) -> Liveness:
        record = self.registry.endpoints.get(endpoint_id)
        report = record.reports.latest if record is not None else None
        if record is None or report is None or not record.reports.arriving(self._clock()):
            return "silent"
        expected_ms = report.expected_step_ms or max(report.step_time.knot_ms, default=0.0)
        is_stuck = report.silent_s > max(self._stall_timeout_s, STALL_STEPS * expected_ms / 1000)
        return "stuck" if is_stuck or report.frozen_s > self._freeze_timeout_s else "working"

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        waits_s = [self.queues.left_s(each.key, ticket) for each in self.registry.named(model)]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def finished(self, assignment: Assignment, served: CompletedRequest | None = None) -> None:
        sent = self._release(assignment, failed=False)
        if sent is None:
            return
        if served is not None:
            self._learn(assignment, sent, served)
        self.queues.pump(sent.record.deployment)

    def failed(self, assignment: Assignment, kind: FailureKind) -> None:
        sent = self._open.get(assignment.decision)
        if sent is None:
            return
        record, now = sent.record, self._clock()
        match kind:
            case "lost" | "killed" | "crashed" | "stalled":
                self.poison_detection.engine_failed(assignment.decision, record, kind, now)
        self._release(assignment, failed=kind != "request")
        if kind == "unreachable":
            record.unreachable = True
        elif kind == "declined":
            record.draining = record.draining or assignment.decision > record.readmitted_at
        elif kind == "refused":
            record.refusal_backoff.refused(record.in_flight, now)
        self.registry.changed(record)
        self.recovery.failed(record, assignment.decision, kind, self.placement.num_decisions, now)
        self.queues.pump(record.deployment)

    def withdrawn(self, assignment: Assignment) -> None:
        sent = self._release(assignment, failed=True)
        if sent is not None:
            self.queues.pump(sent.record.deployment)

    def record_outcome(self, outcome: RequestOutcome) -> None:
        self.traffic.record_outcome(outcome)

    def _resolve_in_time(self, model: str, until: float) -> Target | None:
        """Return the target like `resolve`; None while an engine is expected within the time."""
        is_over = self._clock() >= until or max(self._outages.waits_left_s(model).values(), default=0.0) <= 0
        if is_over or self._eligible.settled(model):
            return self.resolve(model)
        self._outages.note_demand(self.registry.named(model))
        return None

    def _place(self, to_place: PlacementRequest, outage: Outage) -> Assignment | None:
        """Choose an endpoint and count the choice; None if there is no capacity, or no engine but one is expected."""
        now, target, need = self._clock(), to_place.target, to_place.need
        deployment, usable = self._eligible.endpoints(target)
        if deployment is None or (not usable and outage.is_over(now, self._outages.wait_left_s(deployment))):
            what = "engines that know the adapter" if target.adapter_digest else "engines"
            raise unavailable(
                f"The {what} of {target.deployment} went away. Try again.",
                retry_after_s=self._outages.start_left_s(target.deployment) or 1,
                code=NOT_READY,
            )
        if not usable:
            self._outages.note_demand([deployment])
            return None
        outage.ended()

        def fits(record: EndpointRecord, num_cached_tokens: int) -> bool:
            return has_capacity(record, need.with_cached(num_cached_tokens), now)

        pool = self._eligible.pool(usable, to_place, now)
        if to_place.charged_tokens is not None:
            # A waiting request is tried with every report, usually in vain, so full engines are left out first.
            pool = [record for record in pool if fits(record, need.num_prompt_tokens)]
        if not pool:
            return None
        policy = self._policies.named(deployment.model.routing_policy)
        placed = self.placement.place(to_place.work, need.num_sequences, policy, deployment, pool, fits, now)
        return self._account(placed, deployment, to_place, now) if placed is not None else None

    def _cost_of_turn(self, to_place: PlacementRequest) -> int:
        """Return the cost of a turn before the endpoint is known: that on the engine with the most cached tokens."""
        _, usable = self._eligible.endpoints(to_place.target)
        num_cached_tokens = self.placement.most_cached_tokens(to_place.request, usable, self._clock())
        return to_place.need.with_cached(num_cached_tokens).cost_tokens

    def _learn(self, assignment: Assignment, sent: InFlightRequest, served: CompletedRequest) -> None:
        record, need = sent.record, sent.need
        deployment = self.registry.deployments.get(record.deployment)
        if deployment is None:
            return
        siblings = (each for each in deployment.records if each.usable)
        self.recovery.served(record, assignment.decision, served, siblings, self.placement.num_decisions, self._clock())
        deployment.output_tokens.ended(served.num_output_tokens / need.num_sequences, need.max_tokens)
        surplus = need.cost_with(served.num_output_tokens) - sent.charged_tokens
        self.queues.settle(deployment.key, sent.key, sent.priority, surplus)

    def _account(
        self, placed: PlacementResult, deployment: DeploymentRecord, to_place: PlacementRequest, now: float
    ) -> Assignment:
        decision, record, candidate, ticket = placed.number, placed.record, placed.candidate, to_place.ticket
        need = to_place.need.with_cached(candidate.num_cached_tokens)
        charged_tokens = need.cost_tokens if to_place.charged_tokens is None else to_place.charged_tokens
        record.refusal_backoff.chosen(candidate.in_flight, now)
        self.recovery.ejection(record).chosen(decision, now)
        record.reserved.reserve(decision, need, need.num_bytes(record.block_size, record.kinds))
        self._open[decision] = InFlightRequest(record, need, ticket.key, ticket.priority, charged_tokens)
        self.poison_detection.probe_started(decision, record, to_place.probe, now)
        return Assignment(
            decision=decision,
            endpoint_id=record.endpoint.id,
            data_url=record.endpoint.data_url,
            token=self.registry.token_of(record),
            policy=placed.policy,
            believed=candidate.believed,
            predicted_cached_tokens=candidate.num_cached_tokens,
            prefix_chunk_tokens=to_place.request.prefix_chunk_tokens,
            predicted_ttft_ms=placed.predicted_ttft_ms,
            probe=to_place.probe,
        )

    def _release(self, assignment: Assignment, *, failed: bool) -> InFlightRequest | None:
        sent = self._open.pop(assignment.decision, None)
        if sent is None:
            return None
        self.recovery.ejection(sent.record).released(assignment.decision)
        self.poison_detection.released(assignment.decision)
        if not sent.is_freed:
            self._leave(assignment.decision, sent.record, failed=failed)
        return sent

    def _leave(self, decision: int, record: EndpointRecord, *, failed: bool) -> None:
        """Count a request at its engine no longer."""
        record.in_flight -= 1
        record.reserved.release(decision)
        self.placement.ended(decision, record, self._clock(), failed=failed)


def _nothing(_: Target) -> None:
    """Do nothing to undo a target, which reserves nothing."""
