"""The simulated cluster: creates pods for orders, starts them, chooses which to remove, and lets them crash.

It stands for Kubernetes and the operator's writes to it, and knows nothing of requests: it uses `Engines` for what runs
in the pods. `fleet` gives the orders and has the engines.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pagemill_operator.autoscaler.signals import Fleet
from pagemill_operator.backends.start_durations import StartDurations
from pagemill_operator.load.store import emptiest_first
from pagemill_operator.status.observation import Phase, ReplicaObservation
from pagemill_protocol.report.load import EngineReport, EngineStart
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.event_log import EventLog
from pagemill_simulator.fleet.outcome import FleetPoint
from pagemill_simulator.fleet.settings import FleetSettings, PodStart


@dataclass(slots=True, eq=False)
class Pod:
    name: str
    number: int
    """Order of creation."""
    phase: Phase = "pending"
    placed_s: float | None = None
    """Time since which the pod costs; None: it is not scheduled yet."""
    num_starts: int = 0
    """Number of starts of its container, the first one included."""
    start: PodStart | None = None
    """Its latest start, whose phases its engine reports."""

    @property
    def live(self) -> bool:
        return self.phase not in ("draining", "gone")

    @property
    def has_address(self) -> bool:
        """Whether gateways know the pod."""
        return self.phase in ("loading", "ready", "draining")


class Engines(Protocol):
    """The engines in the pods. `platform.pods` is up to date when a method is called."""

    def listed(self) -> None:
        """Note that a pod has got or lost its address."""
        ...

    def ready(self, pod: Pod) -> None:
        """Note that the pod accepts requests from now on."""
        ...

    def crashed(self, pod: Pod) -> None:
        """Note that the pod's engine is lost; it is ready again later."""
        ...

    def drains(self, pod: Pod) -> None:
        """Drain the pod: call `platform.emptied` when it runs nothing any more."""
        ...

    def gone(self, pod: Pod) -> None:
        """Cut off what still runs in the pod."""
        ...

    def held(self) -> Mapping[str, EngineReport]:
        """Return the load by pod name, of those that report."""
        ...

    def num_in_system(self) -> int:
        """Return the number of requests in the system."""
        ...


class Platform:
    def __init__(self, events: Events, settings: FleetSettings, engines: Engines, event_log: EventLog) -> None:
        self._events = events
        self._settings = settings
        self._engines = engines
        self._event_log = event_log
        self._starts = StartDurations()
        self._num_made = 0
        self.wanted = 0
        self.pods: dict[str, Pod] = {}
        """Pods by name in the order of creation, including draining ones."""

    def begin(self) -> None:
        """Begin with the first replicas ready."""
        self.wanted = self._settings.first_replicas
        pods = [self._make() for _ in range(self.wanted)]
        for pod in pods:
            pod.placed_s, pod.num_starts, pod.phase = self._events.now_s, 1, "loading"
            pod.start = self._settings.cold_start.draw(self._settings.seed, pod.number)
        self._engines.listed()
        for pod in pods:
            self._ready(pod)
        self.note()

    def order(self, replicas: int) -> None:
        """Change the number of replicas."""
        if replicas == self.wanted:
            return
        self._event_log.changed(self._events.now_s, self.wanted, replicas)
        self.wanted = replicas
        live = [pod for pod in self.pods.values() if pod.live]
        for _ in range(replicas - len(live)):
            self._start(self._make())
        if len(live) > replicas:
            for pod in self._removal_order(live)[: len(live) - replicas]:
                self._remove(pod)
        self.note()

    def emptied(self, pod: Pod) -> None:
        """Note that a draining pod runs nothing any more."""
        if pod.phase == "draining":
            self._gone(pod)

    def end(self) -> None:
        """End the simulation, and with it the cost of all pods."""
        for pod in self.pods.values():
            self._pay(pod)
        self.note()

    def fleet(self, reported: Iterable[EngineStart]) -> Fleet:
        """Return the fleet as the autoscaler sees it, with the cold start learned from observed or reported starts."""
        now = self._events.now_s
        self._starts.reported(reported)
        seen = [ReplicaObservation(pod.name, pod.phase) for pod in self.pods.values() if pod.live]
        self._starts.observe(seen, now)
        phases = [pod.phase for pod in seen]
        return Fleet(
            wanted=self.wanted,
            ready=phases.count("ready"),
            loading=phases.count("starting") + phases.count("loading"),
            pending=phases.count("pending"),
            starting_s=self._starts.oldest_s(now),
            cold_start_s=self._starts.learned_s,
        )

    def note(self) -> None:
        """Add a point to the timeline."""
        phases = [pod.phase for pod in self.pods.values()]
        ready, draining = phases.count("ready"), phases.count("draining")
        point = FleetPoint(
            at_s=self._events.now_s,
            wanted=self.wanted,
            starting=len(phases) - ready - draining,
            ready=ready,
            draining=draining,
            num_in_system=self._engines.num_in_system(),
        )
        self._event_log.note(point)

    def _make(self) -> Pod:
        pod = Pod(f"pod-{self._num_made}", self._num_made)
        self._num_made += 1
        self.pods[pod.name] = pod
        return pod

    def _start(self, pod: Pod) -> None:
        start = self._settings.cold_start.draw(self._settings.seed, pod.number)
        pod.num_starts = 1
        self._events.after(start.schedule_s, partial(self._place, pod, start))

    def _place(self, pod: Pod, start: PodStart) -> None:
        if pod.phase != "pending":
            return
        pod.phase, pod.placed_s, pod.start = "starting", self._events.now_s, start
        self._events.after(start.pull_s, partial(self._load, pod, start))

    def _load(self, pod: Pod, start: PodStart) -> None:
        if pod.phase != "starting":
            return
        pod.phase = "loading"
        self._engines.listed()
        self._events.after(start.restart_s, partial(self._loaded, pod, pod.num_starts))

    def _loaded(self, pod: Pod, start: int) -> None:
        if pod.phase == "loading" and pod.num_starts == start:
            self._ready(pod)
            self.note()

    def _ready(self, pod: Pod) -> None:
        pod.phase = "ready"
        self._engines.ready(pod)
        if self._settings.crash_mean_s:
            rng = random.Random(f"{self._settings.seed} crash {pod.num_starts} of pod {pod.number}")
            lifetime_s = rng.expovariate(1 / self._settings.crash_mean_s)
            self._events.after(lifetime_s, partial(self._crash, pod, pod.num_starts))

    def _crash(self, pod: Pod, start: int) -> None:
        if pod.num_starts != start or pod.phase not in ("ready", "draining"):
            return
        self._event_log.crashed()
        if pod.phase == "draining":
            self._gone(pod)
            return
        pod.phase = "loading"
        self._engines.crashed(pod)
        pod.start = again = self._settings.cold_start.draw(self._settings.seed, pod.number, pod.num_starts)
        pod.num_starts += 1
        self._events.after(again.restart_s, partial(self._loaded, pod, pod.num_starts))
        self.note()

    def _removal_order(self, live: list[Pod]) -> list[Pod]:
        """Return the pods in Kubernetes's order of removal with the operator's deletion costs: unready, then emptiest
        first.
        """
        youngest_first = live[::-1]
        unready = [pod for phase in ("pending", "starting", "loading") for pod in youngest_first if pod.phase == phase]
        ready = [pod for pod in youngest_first if pod.phase == "ready"]
        return unready + emptiest_first(ready, lambda pod: pod.name, self._engines.held())

    def _remove(self, pod: Pod) -> None:
        if pod.phase != "ready":
            self._gone(pod)
            return
        pod.phase = "draining"
        self._events.after(self._settings.drain_timeout_s, partial(self.emptied, pod))
        self._engines.listed()
        self._engines.drains(pod)

    def _gone(self, pod: Pod) -> None:
        self._pay(pod)
        was_listed = pod.has_address
        pod.phase = "gone"
        del self.pods[pod.name]
        self._engines.gone(pod)
        if was_listed:
            self._engines.listed()
        self.note()

    def _pay(self, pod: Pod) -> None:
        if pod.placed_s is not None:
            self._event_log.paid(self._events.now_s - pod.placed_s)
