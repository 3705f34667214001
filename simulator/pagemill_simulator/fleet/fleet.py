"""A simulated fleet: engines in pods that come and go, behind the gateway's real brain.

Real are the brain (registry, prefix index, capacity, queue, routing, load frames) with the relay's attempts, and the
autoscaler's signals and learned cold starts; of the engines (`engines`) either everything but the forward passes, or in
fast-forward the decisions of their schedulers. Simulated are time, the network, and the cluster (`platform`). The same
workload, settings and policy give the same outcome, bit for bit, except for `wall_s`.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from pagemill_engine.config import EngineConfig
from pagemill_gateway.processes.garbage_collection import MIDDLE_ROUNDS, NEW_OBJECTS, YOUNG_ROUNDS
from pagemill_operator.autoscaler.signals import Activity, GatewayReport, merge
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.load import DeploymentLoad, EngineReport
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import FailureKind
from pagemill_routing.config import RoutingConfig
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.fleet.batch_lines import BatchLines
from pagemill_simulator.fleet.conversations import Conversations
from pagemill_simulator.fleet.engines.engines import EngineKind
from pagemill_simulator.fleet.engines.exact_engines import ExactEngines
from pagemill_simulator.fleet.engines.fast_engines import FastEngines
from pagemill_simulator.fleet.event_log import EventLog
from pagemill_simulator.fleet.outcome import FleetOutcome, Served
from pagemill_simulator.fleet.platform import Platform, Pod
from pagemill_simulator.fleet.relay import MODEL, OnFirstToken, PodRun, SimulatedRelay
from pagemill_simulator.fleet.settings import FleetSettings, FleetSettingsError
from pagemill_simulator.pod import NETWORK_S
from pagemill_simulator.scaling.policy import FleetScaler, FleetSnapshot, PodSnapshot, ReplicaBounds
from pagemill_simulator.workloads.request import Workload

PROGRESS_STEPS = 200
POINT_S = 5.0
"""Seconds between two points of the timeline if nothing changes."""


def simulate_fleet(
    workload: Workload,
    settings: FleetSettings,
    policy: FleetScaler,
    *,
    fast: bool = False,
    progress: Callable[[float], None] | None = None,
    on_end: Callable[[Served], None] | None = None,
    on_first_token: OnFirstToken | None = None,
) -> FleetOutcome:
    """Serve `workload` with as many pods as `policy` orders; return the outcome.

    With `fast`, engines decide on counters: a hundred pods for an hour take minutes, and figures are within a few
    percent of the exact ones. `progress` is called with the completed share. `on_end` is called with each request that
    ends, `on_first_token` with each first token; an exception of them ends the simulation. Raise `FleetSettingsError`,
    or `RuntimeError` if a request ended twice or never.
    """
    settings = settings.checked()
    adapters = _adapters_of(workload, settings, fast=fast)
    slots = settings.adapters._replace(names=tuple(adapters)) if settings.adapters is not None else None
    kind = FastEngines if fast else partial(ExactEngines, adapters=slots)
    with _reduced_garbage_collection():
        return _Fleet(workload, adapters, settings, policy, kind, progress, on_end, on_first_token).run()


def _adapters_of(workload: Workload, settings: FleetSettings, *, fast: bool) -> list[str]:
    """Return the adapters that the workload names. Raise `FleetSettingsError` if the fleet cannot serve it."""
    adapters = {each.adapter for each in workload.requests} - {""}
    if fast and (adapters or settings.adapters or any(each.token_ids for each in workload.requests)):
        raise FleetSettingsError(
            f"fast: the workload {workload.name!r} has token ids or adapters, which engines in fast-forward do not "
            "compare or load: simulate it exactly"
        )
    if adapters and settings.adapters is None:
        raise FleetSettingsError(
            f"adapters: None, but the workload {workload.name!r} names {len(adapters)} adapters: give the pods slots"
        )
    return sorted(adapters)


@contextmanager
def _reduced_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely, as a gateway does: a simulation creates no cycles, and what it keeps grows."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, MIDDLE_ROUNDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Fleet:
    """Implements `platform.Engines`."""

    def __init__(
        self,
        workload: Workload,
        adapters: Sequence[str],
        settings: FleetSettings,
        policy: FleetScaler,
        make_kind: Callable[[EngineConfig, Events], EngineKind],
        progress: Callable[[float], None] | None,
        on_end: Callable[[Served], None] | None,
        on_first_token: OnFirstToken | None,
    ) -> None:
        self._workload = workload
        self._adapters = list(adapters)
        self._activity = Activity()
        self._settings = settings
        self._policy = policy
        self._progress = progress
        self._on_end = on_end
        self._events = events = Events()
        self._kinds = [make_kind(settings.engine_of(each), events) for each in settings.slowness]
        self._loop = EventsLoop(events)
        self._event_log = EventLog(workload)
        config = RoutingConfig(routing_policy=settings.routing_policy, decision_log_size=0)
        self._handover_timeout_s = config.handover_timeout_s
        # As in a cluster, ending endpoints are announced at once, and used while there is no other.
        rng = random.Random(f"{settings.seed} gateway")
        self._brain = LocalBrain(config, keeps_terminating=True, clock=events.now, rng=rng)
        self._pod_runs: dict[str, PodRun] = {}
        """The engine that runs in each pod."""
        self._relay = SimulatedRelay(
            self._brain,
            events,
            self._loop,
            self._pod_runs,
            self._kinds[0].prefix_chunks,
            max_attempts=settings.max_attempts,
            seed=settings.seed,
            on_empty=self._check_empty,
            on_first_token=on_first_token,
        )
        self._conversations = Conversations(workload.requests, self._kinds[0].vocab_size)
        self._platform = Platform(events, settings, self, self._event_log)
        self._controller = _Controller(events, self._platform, policy, settings.bounds, self._snapshot)
        self._batch_lines = BatchLines(
            workload,
            settings.batches,
            self._kinds[0].vocab_size,
            self._brain,
            self._relay,
            events,
            self._loop,
            self._event_log,
        )
        self._num_arrived = self._num_ended = self._num_prompt_tokens = self._num_made_by_gone = 0
        self._num_loads_by_gone = 0

    def run(self) -> FleetOutcome:
        """Run to the end of the traffic and the last token."""
        events, loop, event_log = self._events, self._loop, self._event_log
        self._apply_catalog()
        self._platform.begin()
        self._controller.begin()
        self._schedule_arrival(0)
        self._batch_lines.begin()
        duration_s = self._workload.duration_s
        self._schedule_progress()
        try:
            while event_log.num_open or events.now_s < duration_s:
                events.step()
                loop.run_ready()
        finally:
            loop.close()
        self._platform.end()
        num_adapter_loads = self._num_loads_by_gone
        for pod_run in self._pod_runs.values():
            pod_run.engine.check()
            num_adapter_loads += pod_run.engine.num_adapter_loads
        return event_log.outcome(
            self._policy.name, events.now_s, is_exact=self._kinds[0].is_exact, num_adapter_loads=num_adapter_loads
        )

    def _schedule_progress(self) -> None:
        """Schedule progress events even without a callback, so that the events, and with them the end, are the same."""
        for step in range(1, PROGRESS_STEPS + 1):
            share = step / PROGRESS_STEPS
            self._events.at(self._workload.duration_s * share, partial(self._progress or _ignored, share))

    # Called by the platform.

    def listed(self) -> None:
        self._events.after(NETWORK_S, self._apply_catalog)

    def ready(self, pod: Pod) -> None:
        pod_run = PodRun(pod.name)
        observe, deliver = partial(self._observe, pod_run), partial(self._relay.deliver, pod_run)
        kind = self._kinds[pod.number % len(self._kinds)]
        pod_run.engine = kind.start(pod.name, observe, deliver, pod.start.reported if pod.start else {})
        self._pod_runs[pod.name] = pod_run
        self.listed()
        self._events.after(NETWORK_S, partial(observe, pod_run.engine.snapshot()))

    def crashed(self, pod: Pod) -> None:
        self._end(pod, "lost")
        self.listed()

    def drains(self, pod: Pod) -> None:
        pod_run = self._pod_runs[pod.name]
        pod_run.engine.drain()
        self._loop.spawn(self._hand_over(pod_run))

    def gone(self, pod: Pod) -> None:
        self._end(pod, "declined")

    def held(self) -> Mapping[str, EngineReport]:
        return {each.id: each for each in self._load().replicas}

    def num_in_system(self) -> int:
        return self._num_arrived - self._num_ended

    def _end(self, pod: Pod, kind: FailureKind) -> None:
        pod_run = self._pod_runs.pop(pod.name, None)
        if pod_run is not None:
            pod_run.engine.stop()
            self._num_made_by_gone += pod_run.engine.num_output_tokens
            self._num_loads_by_gone += pod_run.engine.num_adapter_loads
            self._events.after(NETWORK_S, partial(self._cut, pod_run, kind))

    # Input of the gateway.

    def _apply_catalog(self) -> None:
        pods = [pod for pod in self._platform.pods.values() if pod.has_address]
        model = CatalogModel(
            deployment=MODEL,
            name=MODEL,
            queue=self._settings.queue,
            wakes=True,
            adapters=self._adapters,
            endpoints=[_endpoint(pod) for pod in pods],
        )
        self._brain.observer.apply_catalog(Catalog(models=[model]))

    def _observe(self, pod_run: PodRun, frame: StateFrame) -> None:
        if pod_run.engine.is_up:
            self._brain.observer.observe(pod_run.pod_name, frame)

    def _cut(self, pod_run: PodRun, kind: FailureKind) -> None:
        self._brain.observer.stream_lost(pod_run.pod_name)
        if pod_run.pod_name not in self._pod_runs:
            self._brain.observer.unreachable(pod_run.pod_name)
        self._relay.cut(pod_run, kind)

    async def _hand_over(self, pod_run: PodRun) -> None:
        """Drain a pod as `discovery.handover` does: nothing more goes there once another pod can take over."""
        brain, name = self._brain, pod_run.pod_name
        await asyncio.sleep(2 * NETWORK_S)
        await brain.observer.changes.wait_until(lambda: brain.observer.replaceable(name), self._handover_timeout_s)
        brain.observer.drain(name)
        # What was sent before has arrived by then.
        await asyncio.sleep(2 * NETWORK_S)
        brain.observer.drain_acknowledged(name)
        pod_run.accepts_requests = False
        self._check_empty(pod_run)

    def _check_empty(self, pod_run: PodRun) -> None:
        pod = self._platform.pods.get(pod_run.pod_name)
        if pod is not None and not pod_run.accepts_requests and not pod_run.requests:
            self._platform.emptied(pod)

    # Requests.

    def _schedule_arrival(self, index: int) -> None:
        if index < len(self._workload.requests):
            self._events.at(self._workload.requests[index].arrival_s, partial(self._arrive, index))

    def _arrive(self, index: int) -> None:
        self._schedule_arrival(index + 1)
        if self._conversations.arrives(index):
            self._loop.spawn(self._serve(index))

    async def _serve(self, index: int) -> None:
        """Serve a request and then the turns that wait for it."""
        following: int | None = index
        while following is not None:
            index, request = following, self._workload.requests[following]
            prompt = self._conversations.prompt(index)
            self._num_arrived += 1
            self._num_prompt_tokens += len(prompt)
            if not self._platform.wanted:
                self._events.after(0.0, self._wake)
            served, answer = await self._relay.serve(index, request, prompt)
            self._num_ended += 1
            self._event_log.ended(index, served)
            if self._on_end is not None:
                self._on_end(served)
            following = self._conversations.ended(index, prompt, answer)
            if following is not None and (pause_s := self._workload.requests[following].pause_s):
                await asyncio.sleep(pause_s)

    def _wake(self) -> None:
        """Wake the controller, unless a draining pod has taken the request."""
        if not self._platform.wanted and self._load().queue.needs_engine:
            self._controller.wake()

    # Input of the policy.

    def _load(self) -> DeploymentLoad:
        return self._brain.reader.load()[0]

    def _snapshot(self) -> FleetSnapshot:
        load, now = self._load(), self._events.now_s
        pods = self._platform.pods.values()
        return FleetSnapshot(
            at_s=now,
            wanted=self._platform.wanted,
            pods=tuple(self._pod_snapshot(pod) for pod in pods if pod.live),
            num_on_leaving=sum(
                len(pod_run.requests) for name, pod_run in self._pod_runs.items() if not self._is_live(name)
            ),
            num_held=load.queue.num_requests,
            num_arrived=self._num_arrived,
            num_prompt_tokens_arrived=self._num_prompt_tokens,
            num_output_tokens_made=self._num_made_by_gone
            + sum(each.engine.num_output_tokens for each in self._pod_runs.values()),
            signals=self._activity.seen(
                merge([GatewayReport(load)], self._platform.fleet(load.starts), num_gateways=1, at_s=now)
            ),
        )

    def _pod_snapshot(self, pod: Pod) -> PodSnapshot:
        pod_run = self._pod_runs.get(pod.name)
        if pod_run is None:
            return PodSnapshot(pod.name, is_ready=False)
        return PodSnapshot(pod.name, True, pod_run.engine.load)

    def _is_live(self, name: str) -> bool:
        pod = self._platform.pods.get(name)
        return pod is not None and pod.live


class _Controller:
    """Asks the scaling policy, periodically and when a request finds no pod, and orders the replicas."""

    def __init__(
        self,
        events: Events,
        platform: Platform,
        policy: FleetScaler,
        bounds: ReplicaBounds,
        see: Callable[[], FleetSnapshot],
    ) -> None:
        """`see` returns the present state of the fleet."""
        self._events = events
        self._platform = platform
        self._policy = policy
        self._bounds = bounds
        self._see = see
        self._is_woken = False

    def begin(self) -> None:
        self._events.after(self._policy.interval_s, self._decide_regularly)
        self._events.after(POINT_S, self._note_regularly)

    def wake(self) -> None:
        """Decide at once: a request finds no pod, not even a starting one."""
        if self._policy.wakes_at_once and not self._is_woken:
            self._is_woken = True
            self._events.after(0.0, self._decide_now)

    def _decide_regularly(self) -> None:
        self._decide()
        self._events.after(self._policy.interval_s, self._decide_regularly)

    def _decide_now(self) -> None:
        self._is_woken = False
        self._decide()

    def _decide(self) -> None:
        replicas = self._policy.decide(self._see())
        self._platform.order(max(self._bounds.min_replicas, min(self._bounds.max_replicas, replicas)))

    def _note_regularly(self) -> None:
        self._platform.note()
        self._events.after(POINT_S, self._note_regularly)


def _ignored(share: float) -> None:
    """Ignore the progress."""


def _endpoint(pod: Pod) -> Endpoint:
    return Endpoint(
        id=pod.name,
        data_url=f"http://{pod.name}:8000",
        control_url=f"http://{pod.name}:8001",
        terminating=pod.phase == "draining",
        probed_ready=pod.phase == "ready",
    )
