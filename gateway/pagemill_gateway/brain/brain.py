"""The brain: takes the catalogue and the engines' reports, decides where each request goes, accounts it at once.

It speaks no HTTP: `discovery` feeds it, `relay` asks it (through `brain.interface`), `routing`
holds the policy it asks in turn. Time and chance come from outside, so that a simulation can replay it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from pagemill_gateway.brain.eligible import Eligible
from pagemill_gateway.brain.interface import (
    MAX_REROUTES,
    NOBODY,
    NOT_READY,
    UNSERVED,
    Again,
    Ask,
    Choice,
    Claim,
    Experience,
    FailureKind,
    Served,
    ServedName,
    Target,
)
from pagemill_gateway.brain.load import measure_load
from pagemill_gateway.brain.news import News
from pagemill_gateway.brain.orders import Order, Sent, make_order
from pagemill_gateway.brain.outage import Outage, Outages
from pagemill_gateway.brain.placement import Placed, Placement
from pagemill_gateway.brain.queues import Queues
from pagemill_gateway.brain.recovery import Recovery
from pagemill_gateway.brain.registry import Deployment, EndpointRecord, Registry
from pagemill_gateway.brain.room import has_room
from pagemill_gateway.brain.suspects import Suspects
from pagemill_gateway.brain.traffic import Traffic
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.routing.policies import Policies
from pagemill_protocol.catalog import Catalog, QueueLimits
from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_protocol.load import DeploymentLoad
from pagemill_protocol.state import StateFrame


class LocalBrain:
    """The brain in this process; implements `brain.interface.Brain`."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        first_decision: int = 0,
        made_token: Callable[[str], str] = lambda control_url: "",
    ) -> None:
        """`made_token`: the token that the engine at a control URL has made for itself, as far as it is known here."""
        self._clock = clock
        self._made_token = made_token
        rng = rng or random.Random()
        self._policies = Policies(config.routing_policy, config.routing_session_ms)
        self.placement = Placement(rng, config.decision_log_size)
        self._num_decisions = first_decision
        self._open: dict[int, Sent] = {}
        self._stall_timeout_s = config.stall_timeout_s
        # A static catalogue says `terminating` when nothing may go there any more; a cluster says so at once, while
        # the replacement may not be known here yet.
        self._keeps_terminating = config.discovery == "kubernetes"
        self.news = News()
        self.traffic = Traffic(clock)
        self.queues = Queues(clock, self._is_serving, self._start_left_s)
        self._queue_limits = config.queue
        self.registry = Registry(
            stale_after_s=config.state_stale_after_s,
            ejection_base_s=config.ejection_base_s,
            ejection_max_s=config.ejection_max_s,
        )
        self._outages = Outages(self.registry, self._limits, config.outage_wait_s, clock)
        self._recovery = Recovery(max_ejected_share=config.max_ejected_share, retry_share=config.retry_share)
        self.suspects = Suspects()
        self._eligible = Eligible(
            self.registry, self._recovery, self.suspects, rng, clock, keeps_terminating=self._keeps_terminating
        )

    # What discovery feeds.

    def apply_catalog(self, catalog: Catalog) -> None:
        known, before = self.registry.endpoints, set(self.registry.deployments)
        self.registry.apply(catalog, self._clock())
        self._recovery.know(self.registry.deployments, self.registry.endpoints)
        for endpoint_id, record in known.items():
            if self.registry.endpoints.get(endpoint_id) is not record:
                self.placement.forget(endpoint_id)
        self.traffic.keep(set(self.registry.deployments))
        self.suspects.keep(set(self.registry.deployments))
        self._announce()
        self.queues.forget(before - self.registry.deployments.keys())

    def observe(self, endpoint_id: str, frame: StateFrame) -> None:
        """Apply a state frame of an endpoint. Raises `StateGap`: the caller must connect again."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        now = self._clock()
        was_connected, was_usable, slept = record.reports.connected, record.usable, record.sleeping
        num_identities = record.reports.num_identities
        record.reports.accept(frame, record.reserved.num_sequences, now)
        record.reserved.reported()
        self.placement.observe(record, frame, now)
        record.unreachable = False
        record.being_asked = record.being_asked and not frame.max_model_len
        if (frame.snapshot or slept) and not (frame.draining or frame.sleeping):
            record.let_go = record.acknowledged = False
            record.let_in_at = self._num_decisions
        if not was_connected:
            record.ejection.probe_now()
        if frame.max_model_len > 0:
            record.phase, record.detail = "sleeping" if frame.sleeping else "ready", ""
        deployment = self.registry.deployments[record.deployment]
        deployment.bundle_digest = record.bundle_digest or deployment.bundle_digest
        if frame.snapshot:
            deployment.starts.told(frame.start_s)
        if record.serving:
            deployment.last_served_at = now
            deployment.starts.served(now)
        is_usable = record.usable
        if is_usable != was_usable or record.reports.num_identities != num_identities:
            deployment.changed()
        if is_usable != was_usable:
            self._announce()
        else:
            self.queues.pump(record.deployment)

    def stream_lost(self, endpoint_id: str) -> None:
        """The state stream of an endpoint is down."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        if record.reports.connected and not (record.leaving or record.let_go):
            self.suspects.vanished(record, self._clock())
        record.reports.disconnected()

    def unreachable(self, endpoint_id: str) -> None:
        """Nobody listens at the endpoint's address: it must not get requests until it reports again."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.unreachable = True
            self.registry.changed(record)

    def let_go(self, endpoint_id: str) -> None:
        """Promise never to choose the endpoint again, unless it starts anew."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.let_go = True
            self.registry.changed(record)

    def acknowledged(self, endpoint_id: str) -> None:
        """The endpoint has heard that it is let go."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.acknowledged = True

    def replaceable(self, endpoint_id: str) -> bool:
        """Whether its deployment can do without the endpoint: another one is usable, or the deployment is gone."""
        record = self.registry.endpoints.get(endpoint_id)
        deployment = self.registry.deployments.get(record.deployment) if record is not None else None
        if record is None or deployment is None or record.let_go:
            return True
        if record.endpoint.terminating and not self._keeps_terminating:
            return True
        return any(other.usable for other in deployment.records)

    def being_asked(self, endpoint_id: str) -> None:
        """Somebody asks the endpoint what it is, and nothing is known of it."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.being_asked = True

    def note_phase(self, endpoint_id: str, phase: str, detail: str) -> None:
        """What the `/readyz` of an endpoint that is not ready said, for people and error messages."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        record.phase, record.detail = phase, detail
        if record.being_asked:
            record.being_asked = False
            self.queues.pump(record.deployment)

    def ready(self, endpoint_id: str) -> bool:
        """Whether the endpoint has told what it serves."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is not None and record.max_model_len > 0

    def leaving(self, endpoint_id: str) -> bool:
        """Whether the endpoint is on its way out, or gone from the catalogue."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is None or record.leaving

    def token_of(self, record: EndpointRecord) -> str:
        """Bearer token for `/internal/*` of the endpoint; catalogues may rotate it, and a restarted engine its own."""
        deployment = self.registry.deployments.get(record.deployment)
        if deployment is None:
            return ""
        return deployment.model.engine_token or self._made_token(record.endpoint.control_url)

    # What relays ask.

    def resolve(self, model: str) -> Target:
        """As `look_up`, at once."""
        return self._eligible.resolve(model)

    async def look_up(self, model: str) -> Target:
        return self.resolve(model)

    async def names(self) -> list[ServedName]:
        return [self._served_name(name) for name in self.registry.names()]

    async def find(self, model: str, claim: Claim = NOBODY) -> Target:
        try:
            return self.resolve(model)
        except PagemillError as error:
            if error.code != NOT_READY:
                raise
        self._outages.wish_for(self._outages.wanted(model))
        left_s = self._outages.lefts_s(model)
        if max(left_s.values(), default=0.0) <= 0:
            return self.resolve(model)
        key = max(left_s, key=lambda each: left_s[each])
        wish = partial(self._resolve_in_time, model, self._clock() + left_s[key])
        target, queued_s = await self.queues.wait(
            key, self._limits(key), claim, wish, group=f"find {model}", cost_tokens=0, undo=_nothing
        )
        return target._replace(queued_s=queued_s)

    async def choose(
        self,
        target: Target,
        tried: frozenset[str],
        ask: Ask,
        *,
        claim: Claim = NOBODY,
        again: Again | None = None,
    ) -> Choice:
        key = target.deployment
        failed_at = self.registry.endpoints.get(again.endpoint_id) if again is not None else None
        self._recovery.admit(key, again, failed_at, self._clock())
        trial = self.suspects.trial_of(key, again.ends) if again is not None else "none"
        order = make_order(self.registry.deployments.get(key), target, tried, ask, claim, again, trial)
        outage = Outage()
        if again is None and not (claim.paid or claim.num_refusals or tried):
            self.traffic.arrived(key, ask.num_prompt_tokens, claim.arrived_at)
        if claim.num_refusals <= MAX_REROUTES and self.queues.is_empty(key):
            choice = self._place(order, outage)
            if choice is not None:
                return choice
        cost_tokens = self._cost_of_turn(order)
        wish: Callable[[], Choice | None] = partial(self._place, order._replace(charged_tokens=cost_tokens), outage)
        placed, queued_s = await self.queues.wait(
            key,
            self._limits(key),
            claim._replace(key=order.line),
            wish,
            group=order.group,
            cost_tokens=cost_tokens,
            undo=self.given_back,
            kept=again is not None and (again.kind not in UNSERVED or bool(again.ends) or again.num_tokens > 0),
        )
        return placed._replace(queued_s=queued_s)

    def accepted(self, choice: Choice) -> None:
        sent = self._open.get(choice.decision)
        if sent is not None:
            sent.record.fullness.accepted()
            sent.record.reserved.accepted(choice.decision)
            sent.record.outlook.accepted(choice.decision, self._clock())

    def started(self, choice: Choice, ttft_ms: float | None = None) -> None:
        sent = self._open.get(choice.decision)
        if sent is None:
            return
        sent.record.ejection.answered(choice.decision)
        self.placement.computed(choice.decision, sent.record, self._clock(), ttft_ms)
        if self.suspects.acquitted(choice.decision):
            self.queues.pump(sent.record.deployment)

    async def alive(self, endpoint_id: str) -> bool:
        record = self.registry.endpoints.get(endpoint_id)
        if record is None or not record.reports.fresh(self._clock()):
            return False
        report = record.reports.latest
        return report is not None and report.silent_s <= self._stall_timeout_s

    async def expected_s(self, model: str, claim: Claim) -> float | None:
        waits_s = [self.queues.left_s(each.key, claim) for each in self.registry.named(model)]
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def finished(self, choice: Choice, served: Served | None = None) -> None:
        sent = self._release(choice, failed=False)
        if sent is None:
            return
        if served is not None:
            self._learn(choice, sent, served)
        self.queues.pump(sent.record.deployment)

    def failed(self, choice: Choice, kind: FailureKind) -> None:
        sent = self._open.get(choice.decision)
        if sent is None:
            return
        record, now = sent.record, self._clock()
        match kind:
            case "lost" | "killed" | "crashed":
                self.suspects.ended(choice.decision, record, kind, now)
        self._release(choice, failed=kind != "request")
        if kind == "unreachable":
            record.unreachable = True
        elif kind == "declined":
            record.let_go = record.let_go or choice.decision > record.let_in_at
        elif kind == "refused":
            record.fullness.refused(record.in_flight, now)
        self.registry.changed(record)
        self._recovery.failed(record, choice.decision, kind, self._num_decisions, now)
        self.queues.pump(record.deployment)

    def given_back(self, choice: Choice) -> None:
        sent = self._release(choice, failed=True)
        if sent is not None:
            self.queues.pump(sent.record.deployment)

    def experienced(self, experience: Experience) -> None:
        self.traffic.experienced(experience)

    # What status and metrics read.

    def state_age_s(self, record: EndpointRecord) -> float | None:
        """Age of the latest report; None when there never was one."""
        return record.reports.age_s(self._clock())

    def load_elsewhere(self, record: EndpointRecord) -> int:
        """Requests on the endpoint that are not ours, as far as its report is believed."""
        return record.load_elsewhere(self._clock())

    def load(self) -> list[DeploymentLoad]:
        """What the operator is told of each deployment."""
        return measure_load(self.registry, self.queues, self.traffic, self._clock())

    def phase(self, record: EndpointRecord) -> str:
        return record.phase_at(self._clock())

    def _resolve_in_time(self, model: str, until: float) -> Target | None:
        """As `resolve`, but None while an engine may still come."""
        is_over = self._clock() >= until or max(self._outages.lefts_s(model).values(), default=0.0) <= 0
        if is_over or self._eligible.settled(model):
            return self.resolve(model)
        self._outages.wish_for(self.registry.named(model))
        return None

    def _served_name(self, name: str) -> ServedName:
        """Deployments that share it serve what all of them can."""
        deployments = self.registry.named(name)
        lengths = [record.max_model_len for deployment in deployments for record in deployment.usable()]
        first = deployments[0]
        return ServedName(name, first.model.name, min(lengths, default=None), first.adapter_digest(name) != "")

    def _place(self, order: Order, outage: Outage) -> Choice | None:
        """Decide and account; None while there is no room, or no engine but one is expected."""
        now, target, need = self._clock(), order.target, order.need
        deployment, usable = self._eligible.endpoints(target)
        if deployment is None or (not usable and outage.is_over(now, self._outages.left_s(deployment))):
            raise unavailable(
                f"The engines of {target.deployment} went away. Try again.",
                retry_after_s=self._start_left_s(target.deployment) or 1,
                code=NOT_READY,
            )
        if not usable:
            self._outages.wish_for([deployment])
            return None
        outage.ended()

        def fits(record: EndpointRecord, num_cached_tokens: int) -> bool:
            return has_room(record, need.with_cached(num_cached_tokens), now)

        pool = self._eligible.best(self._eligible.able(usable, order, now), order.tried, now)
        if order.charged_tokens is not None:
            # Who waits looks again with every report, mostly in vain: engines that are full anyhow are not weighed.
            pool = [record for record in pool if fits(record, need.num_prompt_tokens)]
        if not pool:
            return None
        number, policy = self._num_decisions + 1, self._policies.named(deployment.model.routing_policy)
        placed = self.placement.place(number, order.work, need.num_sequences, policy, deployment, pool, fits, now)
        return self._account(placed, deployment, order, now) if placed is not None else None

    def _cost_of_turn(self, order: Order) -> int:
        """Before it is known where the turn leads: as on the engine that has most of the prompt."""
        _, usable = self._eligible.endpoints(order.target)
        num_cached_tokens = self.placement.most_cached_tokens(order.ask, usable, self._clock())
        return order.need.with_cached(num_cached_tokens).cost_tokens

    def _learn(self, choice: Choice, sent: Sent, served: Served) -> None:
        record, need = sent.record, sent.need
        deployment = self.registry.deployments.get(record.deployment)
        if deployment is None:
            return
        siblings = (each for each in deployment.records if each.usable)
        self._recovery.served(record, choice.decision, served, siblings, self._num_decisions, self._clock())
        deployment.output_tokens.ended(served.num_output_tokens / need.num_sequences, need.max_tokens)
        surplus = need.num_uncached_tokens + served.num_output_tokens - sent.charged_tokens
        self.queues.settle(deployment.key, sent.key, sent.priority, surplus)

    def _limits(self, key: str) -> QueueLimits:
        deployment = self.registry.deployments.get(key)
        return (deployment.model.queue if deployment is not None else None) or self._queue_limits

    def _is_serving(self, key: str) -> bool:
        deployment = self.registry.deployments.get(key)
        return deployment is not None and deployment.serving

    def _start_left_s(self, key: str) -> float | None:
        """Until the deployment has an engine again; `None` also while it has one."""
        deployment = self.registry.deployments.get(key)
        return deployment.starts.left_s(self._clock()) if deployment is not None and not deployment.serving else None

    def _announce(self) -> None:
        """Who may get requests has changed: everybody who waits looks again."""
        self.news.publish()
        self.queues.pump_all()

    def _account(self, placed: Placed, deployment: Deployment, order: Order, now: float) -> Choice:
        self._num_decisions = decision = placed.number
        record, candidate, claim = placed.record, placed.candidate, order.claim
        need = order.need.with_cached(candidate.num_cached_tokens)
        charged_tokens = need.cost_tokens if order.charged_tokens is None else order.charged_tokens
        record.fullness.chosen(candidate.in_flight, now)
        record.ejection.chosen(decision, now)
        record.reserved.reserve(decision, need, record.block_size)
        self._open[decision] = Sent(record, need, claim.key, claim.priority, charged_tokens)
        self.suspects.began(decision, record, order.trial, now)
        return Choice(
            decision=decision,
            endpoint_id=record.endpoint.id,
            data_url=record.endpoint.data_url,
            token=self.token_of(record),
            policy=placed.policy,
            believed=candidate.believed,
            predicted_cached_tokens=candidate.num_cached_tokens,
            granule_tokens=order.ask.granule_tokens,
            predicted_ttft_ms=placed.predicted_ttft_ms,
            trial=order.trial,
        )

    def _release(self, choice: Choice, *, failed: bool) -> Sent | None:
        sent = self._open.pop(choice.decision, None)
        if sent is None:
            return None
        record = sent.record
        record.in_flight -= 1
        record.ejection.released(choice.decision)
        self.suspects.released(choice.decision)
        record.reserved.release(choice.decision)
        self.placement.ended(choice.decision, record, self._clock(), failed=failed)
        return sent


def _nothing(_: Target) -> None:
    """A target that came too late holds nothing."""
