"""The brain: takes the catalogue and the engines' reports, decides where each request goes, accounts it at once.

It speaks no HTTP: `discovery` feeds it, `relay` asks it (through `brain.interface`), `routing`
holds the policy it asks in turn. Time and chance come from outside, so that a simulation can replay it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pagemill_gateway.admission.reservations import Need
from pagemill_gateway.brain.interface import MAX_REROUTES, NOBODY, NOT_READY, Ask, Choice, Claim, FailureKind, Target
from pagemill_gateway.brain.load import DeploymentLoad, measure_load
from pagemill_gateway.brain.news import News
from pagemill_gateway.brain.outage import Outage
from pagemill_gateway.brain.placement import Placed, Placement
from pagemill_gateway.brain.queues import Queues
from pagemill_gateway.brain.registry import Deployment, EndpointRecord, Registry
from pagemill_gateway.brain.room import has_room
from pagemill_gateway.brain.schemes import common_scheme
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.routing.policies import Policies
from pagemill_protocol.catalog import Catalog, QueueLimits
from pagemill_protocol.errors import PagemillError, model_not_found, unavailable
from pagemill_protocol.state import StateFrame

LOADING_RETRY_AFTER_S = 5.0


class _Sent(NamedTuple):
    """A request that is at an engine."""

    record: EndpointRecord
    need: Need
    key: str
    priority: int
    charged_tokens: int
    """For its turn; as much as it was thought to cost here where it had to wait for none."""


class _Order(NamedTuple):
    """A request that is to be placed."""

    target: Target
    tried: frozenset[str]
    ask: Ask
    claim: Claim
    need: Need
    """As if nothing of the prompt were cached."""
    charged_tokens: int | None = None
    """For its turn in the queue; None: it has not waited."""


class LocalBrain:
    """The brain in this process; implements `brain.interface.Brain`."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._policies = Policies(config.routing_policy, config.routing_session_ms)
        self.placement = Placement(self._rng, config.decision_log_size)
        self._num_decisions = 0
        self._open: dict[int, _Sent] = {}
        self._outage_wait_s = config.outage_wait_s
        # A static catalogue says `terminating` when nothing may go there any more; a cluster says so at once, while
        # the replacement may not be known here yet.
        self._keeps_terminating = config.discovery == "kubernetes"
        self.news = News()
        self.queues = Queues(clock, self._is_serving)
        self._queue_limits = config.queue
        self.registry = Registry(
            stale_after_s=config.state_stale_after_s,
            ejection_base_s=config.ejection_base_s,
            ejection_max_s=config.ejection_max_s,
        )

    # What discovery feeds.

    def apply_catalog(self, catalog: Catalog) -> None:
        known, before = self.registry.endpoints, set(self.registry.deployments)
        self.registry.apply(catalog, self._clock())
        for endpoint_id, record in known.items():
            if self.registry.endpoints.get(endpoint_id) is not record:
                self.placement.forget(endpoint_id)
        self._announce()
        self.queues.forget(before - self.registry.deployments.keys())

    def observe(self, endpoint_id: str, frame: StateFrame) -> None:
        """Apply a state frame of an endpoint. Raises `StateGap`: the caller must connect again."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is None:
            return
        now = self._clock()
        was_connected, was_usable = record.reports.connected, record.usable
        record.reports.accept(frame, record.reserved.num_sequences, now)
        record.reserved.reported()
        self.placement.observe(record, frame, now)
        record.unreachable = False
        if frame.snapshot and not frame.draining:
            record.let_go = record.acknowledged = False
        if not was_connected:
            record.ejection.probe_now()
        if frame.max_model_len > 0:
            record.phase, record.detail = "ready", ""
        if record.serving:
            self.registry.deployments[record.deployment].last_served_at = now
        if record.usable != was_usable:
            self._announce()
        else:
            self.queues.pump(record.deployment)

    def stream_lost(self, endpoint_id: str) -> None:
        """The state stream of an endpoint is down."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.reports.disconnected()

    def unreachable(self, endpoint_id: str) -> None:
        """Nobody listens at the endpoint's address: it must not get requests until it reports again."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.unreachable = True

    def let_go(self, endpoint_id: str) -> None:
        """Promise never to choose the endpoint again, unless it starts anew."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.let_go = True

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

    def note_phase(self, endpoint_id: str, phase: str, detail: str) -> None:
        """What the `/readyz` of an endpoint that is not ready said, for people and error messages."""
        record = self.registry.endpoints.get(endpoint_id)
        if record is not None:
            record.phase, record.detail = phase, detail

    def ready(self, endpoint_id: str) -> bool:
        """Whether the endpoint has told what it serves."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is not None and record.max_model_len > 0

    def leaving(self, endpoint_id: str) -> bool:
        """Whether the endpoint is on its way out, or gone from the catalogue."""
        record = self.registry.endpoints.get(endpoint_id)
        return record is None or record.leaving

    def token_of(self, record: EndpointRecord) -> str:
        """Bearer token for `/internal/*` of the endpoint; catalogues may rotate it."""
        deployment = self.registry.deployments.get(record.deployment)
        return deployment.model.engine_token if deployment is not None else ""

    # What relays ask.

    def resolve(self, model: str) -> Target:
        deployments = self.registry.named(model)
        if not deployments:
            raise model_not_found(model, self.registry.names())
        deployment = self._share(deployments)
        if deployment is None:
            raise _nothing_ready(model, deployments)
        usable = self._serving(deployment)
        digest = self._rng.choice(usable).bundle_digest
        lengths = [record.max_model_len for record in _with_bundle(usable, digest)]
        return Target(
            deployment=deployment.key,
            model=deployment.model.name,
            bundle_digest=digest,
            max_model_len=min(lengths),
            chat_template=deployment.model.chat_template,
            prefix_scope=deployment.model.prefix_scope,
            scheme=common_scheme(usable),
            session_header=deployment.model.session_header.lower(),
        )

    async def find(self, model: str, claim: Claim = NOBODY) -> Target:
        try:
            return self.resolve(model)
        except PagemillError as error:
            if error.code != NOT_READY:
                raise
        wanted = [each for each in self.registry.named(model) if each.model.weight > 0]
        left_s = {each.key: self._outage_left_s(each) for each in wanted}
        if max(left_s.values(), default=0.0) <= 0:
            return self.resolve(model)
        key = max(left_s, key=lambda each: left_s[each])
        wish = partial(self._resolve_in_time, model, self._clock() + left_s[key])
        target, queued_s = await self.queues.wait(
            key, self._limits(key), claim, wish, group=f"find {model}", cost_tokens=0, undo=_nothing
        )
        return target._replace(queued_s=queued_s)

    async def choose(self, target: Target, tried: frozenset[str], ask: Ask, *, claim: Claim = NOBODY) -> Choice:
        key, num_prompt_tokens = target.deployment, ask.num_prompt_tokens
        num_output_tokens = self._num_output_tokens(target, num_prompt_tokens, claim)
        need = Need(num_prompt_tokens, num_prompt_tokens, num_output_tokens, claim.num_sequences, claim.max_tokens)
        order, outage = _Order(target, tried, ask, claim, need), Outage()
        if claim.num_refusals <= MAX_REROUTES and self.queues.is_empty(key):
            choice = self._place(order, outage)
            if choice is not None:
                return choice
        cost_tokens = self._cost_of_turn(order)
        wish: Callable[[], Choice | None] = partial(self._place, order._replace(charged_tokens=cost_tokens), outage)
        placed, queued_s = await self.queues.wait(
            key,
            self._limits(key),
            claim,
            wish,
            group=target.bundle_digest,
            cost_tokens=cost_tokens,
            undo=self._give_back,
        )
        return placed._replace(queued_s=queued_s)

    def accepted(self, choice: Choice) -> None:
        sent = self._open.get(choice.decision)
        if sent is not None:
            sent.record.fullness.accepted()
            sent.record.reserved.accepted(choice.decision)

    def started(self, choice: Choice) -> None:
        sent = self._open.get(choice.decision)
        if sent is not None:
            sent.record.ejection.succeeded()
            self.placement.computed(choice.decision, sent.record, self._clock())

    def alive(self, choice: Choice) -> bool:
        sent = self._open.get(choice.decision)
        return sent is not None and sent.record.reports.fresh(self._clock())

    def finished(self, choice: Choice, num_output_tokens: int | None = None) -> None:
        sent = self._release(choice, failed=False)
        if sent is None:
            return
        if num_output_tokens is not None:
            self._learn(sent, num_output_tokens)
        self.queues.pump(sent.record.deployment)

    def failed(self, choice: Choice, kind: FailureKind) -> None:
        sent = self._release(choice, failed=kind != "request")
        if sent is None:
            return
        record, now = sent.record, self._clock()
        if kind == "unreachable":
            record.unreachable = True
        if kind in ("broken", "unreachable"):
            record.ejection.failed(now)
        elif kind == "declined":
            record.let_go = True
        else:
            record.ejection.succeeded()
        if kind == "refused":
            record.fullness.refused(record.in_flight, now)
        self.queues.pump(record.deployment)

    # What status and metrics read.

    def state_age_s(self, record: EndpointRecord) -> float | None:
        """Age of the latest report; None when there never was one."""
        return record.reports.age_s(self._clock())

    def load_elsewhere(self, record: EndpointRecord) -> int:
        """Requests on the endpoint that are not ours, as far as its report is believed."""
        return record.load_elsewhere(self._clock())

    def load(self) -> list[DeploymentLoad]:
        """What all engines of each deployment say together."""
        return measure_load(self.registry, self.queues, self._clock())

    def phase(self, record: EndpointRecord) -> str:
        """One word: draining, starting, ejected, stale or ready; the first that is true."""
        now = self._clock()
        if record.leaving:
            return "draining"
        if not record.usable:
            return "starting"
        if not record.ejection.allows(now):
            return "ejected"
        return "ready" if record.reports.fresh(now) else "stale"

    def _serving(self, deployment: Deployment) -> list[EndpointRecord]:
        """Who may get a request: those that stay; failing that, those that leave and still take some."""
        return deployment.usable() or self._departing(deployment)

    def _departing(self, deployment: Deployment) -> list[EndpointRecord]:
        departing = deployment.departing()
        return [each for each in departing if self._keeps_terminating or not each.endpoint.terminating]

    def _settled(self, model: str) -> bool:
        """Nothing is left to wait for: somebody serves the name, or nobody has it any more."""
        deployments = self.registry.named(model)
        return not deployments or self._share(deployments) is not None

    def _resolve_in_time(self, model: str, until: float) -> Target | None:
        """As `resolve`, but None while an engine may still come."""
        if self._settled(model) or self._clock() >= until:
            return self.resolve(model)
        return None

    def _give_back(self, choice: Choice) -> None:
        """It was never sent, so nothing comes of it there."""
        sent = self._release(choice, failed=True)
        if sent is not None:
            self.queues.pump(sent.record.deployment)

    def _place(self, order: _Order, outage: Outage) -> Choice | None:
        """Decide and account; None while there is no room, or no engine but one is expected."""
        now, target, need = self._clock(), order.target, order.need
        deployment, usable = self._usable_for(target)
        if deployment is None or (not usable and outage.is_over(now, self._outage_left_s(deployment))):
            raise unavailable(
                f"The engines of {target.deployment} went away. Try again.", retry_after_s=1, code=NOT_READY
            )
        if not usable:
            return None
        outage.ended()

        def fits(record: EndpointRecord, num_cached_tokens: int) -> bool:
            return has_room(record, need.with_cached(num_cached_tokens), now)

        pool = _best_pool(usable, order.tried, now)
        if order.charged_tokens is not None:
            # Who waits looks again with every report, mostly in vain: engines that are full anyhow are not weighed.
            pool = [record for record in pool if fits(record, need.num_prompt_tokens)]
        if not pool:
            return None
        number, policy = self._num_decisions + 1, self._policies.named(deployment.model.routing_policy)
        placed = self.placement.place(number, order.ask, need.num_sequences, policy, deployment, pool, fits, now)
        return self._account(placed, deployment, order, now) if placed is not None else None

    def _cost_of_turn(self, order: _Order) -> int:
        """Before it is known where the turn leads: as on the engine that has most of the prompt."""
        _, usable = self._usable_for(order.target)
        num_cached_tokens = self.placement.most_cached_tokens(order.ask, usable, self._clock())
        return order.need.with_cached(num_cached_tokens).cost_tokens

    def _num_output_tokens(self, target: Target, num_prompt_tokens: int, claim: Claim) -> int:
        """Of each sequence, as learned from the deployment's answers and within its context."""
        deployment = self.registry.deployments.get(target.deployment)
        if deployment is None:
            return 1
        return max(1, min(deployment.output_tokens.expect(claim.max_tokens), target.max_model_len - num_prompt_tokens))

    def _learn(self, sent: _Sent, num_output_tokens: int) -> None:
        deployment = self.registry.deployments.get(sent.record.deployment)
        if deployment is None:
            return
        need = sent.need
        deployment.output_tokens.ended(num_output_tokens / need.num_sequences, need.max_tokens)
        surplus = need.num_uncached_tokens + num_output_tokens - sent.charged_tokens
        self.queues.settle(deployment.key, sent.key, sent.priority, surplus)

    def _limits(self, key: str) -> QueueLimits:
        deployment = self.registry.deployments.get(key)
        return (deployment.model.queue if deployment is not None else None) or self._queue_limits

    def _is_serving(self, key: str) -> bool:
        deployment = self.registry.deployments.get(key)
        return deployment is not None and any(record.serving for record in deployment.records)

    def _announce(self) -> None:
        """Who may get requests has changed: everybody who waits looks again."""
        self.news.publish()
        self.queues.pump_all()

    def _usable_for(self, target: Target) -> tuple[Deployment | None, list[EndpointRecord]]:
        """The target's deployment, and the endpoints that understand its token ids."""
        deployment = self.registry.deployments.get(target.deployment)
        if deployment is None:
            return None, []
        usable = _with_bundle(deployment.usable(), target.bundle_digest)
        return deployment, usable or _with_bundle(self._departing(deployment), target.bundle_digest)

    def _outage_left_s(self, deployment: Deployment) -> float:
        """How much longer requests may wait for an engine: one that was lost a moment ago, or is known to be ready."""
        if any(record.expected for record in deployment.records):
            return self._outage_wait_s
        if deployment.last_served_at is None:
            return 0.0
        return max(0.0, deployment.last_served_at + self._outage_wait_s - self._clock())

    def _account(self, placed: Placed, deployment: Deployment, order: _Order, now: float) -> Choice:
        self._num_decisions = decision = placed.number
        record, candidate, claim = placed.record, placed.candidate, order.claim
        need = order.need.with_cached(candidate.num_cached_tokens)
        charged_tokens = need.cost_tokens if order.charged_tokens is None else order.charged_tokens
        record.fullness.chosen(candidate.in_flight, now)
        record.ejection.chosen(decision, now)
        record.reserved.reserve(decision, need, record.block_size)
        self._open[decision] = _Sent(record, need, claim.key, claim.priority, charged_tokens)
        return Choice(
            decision=decision,
            endpoint_id=record.endpoint.id,
            data_url=record.endpoint.data_url,
            token=deployment.model.engine_token,
            policy=placed.policy,
            believed=candidate.believed,
            predicted_cached_tokens=candidate.num_cached_tokens,
            granule_tokens=order.ask.granule_tokens,
            predicted_ttft_ms=placed.predicted_ttft_ms,
        )

    def _release(self, choice: Choice, *, failed: bool) -> _Sent | None:
        sent = self._open.pop(choice.decision, None)
        if sent is None:
            return None
        record = sent.record
        record.in_flight -= 1
        record.ejection.released(choice.decision)
        record.reserved.release(choice.decision)
        self.placement.ended(choice.decision, record, self._clock(), failed=failed)
        return sent

    def _share(self, deployments: list[Deployment]) -> Deployment | None:
        """One of the deployments that can serve, drawn by weight."""
        wanted = [deployment for deployment in deployments if deployment.model.weight > 0]
        ready = [deployment for deployment in wanted if deployment.usable()]
        if not ready:
            ready = [deployment for deployment in wanted if self._serving(deployment)]
        if len(ready) <= 1:
            return ready[0] if ready else None
        return self._rng.choices(ready, weights=[deployment.model.weight for deployment in ready])[0]


def _nothing(_: Target) -> None:
    """A target that came too late holds nothing."""


def _with_bundle(records: list[EndpointRecord], digest: str) -> list[EndpointRecord]:
    return [record for record in records if record.bundle_digest == digest]


def _best_pool(usable: list[EndpointRecord], tried: frozenset[str], now: float) -> list[EndpointRecord]:
    """Healthy endpoints not tried before; failing that untried ones; failing that all. Never empty."""
    untried = [record for record in usable if record.endpoint.id not in tried]
    healthy = [record for record in untried if record.ejection.allows(now)]
    return healthy or untried or usable


def _nothing_ready(model: str, deployments: list[Deployment]) -> PagemillError:
    records = [record for deployment in deployments for record in deployment.records]
    if not records:
        reason = "it has no engine running"
    elif all(record.leaving for record in records):
        reason = "its engines are shutting down"
    elif all(deployment.model.weight <= 0 for deployment in deployments):
        reason = "its routing weight is 0"
    else:
        states = Counter(f"{record.phase}: {record.detail}".rstrip(": ") for record in records if not record.usable)
        reason = "; ".join(f"{count} engine(s) {state}" for state, count in states.most_common(3))
    return unavailable(
        f"The model `{model[:200]}` is not ready yet ({reason}). Try again later.",
        retry_after_s=LOADING_RETRY_AFTER_S,
        code=NOT_READY,
    )
