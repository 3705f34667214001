"""A fleet in fast-forward: a hundred pods for an hour in minutes, by formulas where nothing is decided.

The same cluster (`platform`), controller and event log as in `exact`, and the same decisions of schedulers and gateway,
taken on counters: engines are `fast_pod`, the gateway is `fast_gateway`. It leaves out that pods are ejected for
failing or slowness, that probed requests run alone, and the pauses between attempts. The same workload, settings and
policy give the same outcome, bit for bit, but for the time that it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from pagemill_engine.loop.limits import scheduler_limits
from pagemill_engine.runner.null import DEFAULT_STEP_TIME, NullRunner
from pagemill_gateway.config import GatewayConfig
from pagemill_operator.autoscaler.signals import View, merge
from pagemill_protocol.hashes import prefix_chunk_blocks
from pagemill_protocol.load import EngineHeld
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.controller import Controller
from pagemill_simulator.fleet.conversations import Conversations
from pagemill_simulator.fleet.event_log import EventLog
from pagemill_simulator.fleet.fast_course import Course, Site
from pagemill_simulator.fleet.fast_gateway import FastGateway
from pagemill_simulator.fleet.fast_load import deployment_load, held_by
from pagemill_simulator.fleet.fast_pod import FastPod
from pagemill_simulator.fleet.fast_routing import PodTable
from pagemill_simulator.fleet.fast_steps import StepTimes
from pagemill_simulator.fleet.outcome import Ending, Outcome
from pagemill_simulator.fleet.platform import Platform, Pod
from pagemill_simulator.fleet.progress import tell_progress
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.pod import NETWORK_S
from pagemill_simulator.scaling.policy import PodSeen, ScalingPolicy, Seen
from pagemill_simulator.workloads.request import Workload


def simulate_fleet_fast(
    workload: Workload,
    settings: FleetSettings,
    policy: ScalingPolicy,
    *,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """As `exact.simulate_fleet`, within a few percent of it. Raises `SettingsError`."""
    return _FastFleet(workload, settings.checked(), policy, progress).run()


class _FastFleet:
    """Implements `platform.Engines`."""

    def __init__(
        self,
        workload: Workload,
        settings: FleetSettings,
        policy: ScalingPolicy,
        progress: Callable[[float], None] | None,
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._progress = progress
        engine = msgspec.structs.replace(settings.engine, null_runner=True)
        info = NullRunner.from_config(engine).info
        self._overlaps = info.overlaps if engine.overlap is None else engine.overlap
        self._limits = limits = scheduler_limits(engine, info)
        self._steps = StepTimes(engine.step_time or DEFAULT_STEP_TIME, limits.max_num_batched_tokens)
        self._events = events = Events()
        self._event_log = EventLog(workload)
        self._gateway = FastGateway(
            events,
            settings,
            limits,
            PodTable(limits, self._steps),
            prefix_chunk_tokens=limits.block_size * prefix_chunk_blocks(limits.block_size, limits.num_blocks),
            ended=self._ended,
            emptied=self._look_whether_empty,
        )
        self._handover_timeout_s = GatewayConfig().handover_timeout_s
        self._conversations = Conversations(workload.requests, limits.vocab_size)
        self._platform = Platform(events, settings, self, self._event_log)
        self._controller = Controller(events, self._platform, policy, settings.bounds, self._see)
        self._num_arrived = self._num_ended = self._num_prompt_tokens = 0

    def run(self) -> Outcome:
        """To the end of the traffic and the last token."""
        events, event_log = self._events, self._event_log
        self._platform.begin()
        self._controller.begin()
        self._schedule_arrival(0)
        duration_s = self._workload.duration_s
        tell_progress(events, duration_s, self._progress)
        while event_log.num_open or events.now_s < duration_s:
            events.step()
        self._platform.end()
        return event_log.outcome(self._policy.name, events.now_s, is_exact=False)

    # What the platform asks and reports.

    def listed(self) -> None:
        """No gateway reads a catalogue here."""

    def ready(self, pod: Pod) -> None:
        self._events.after(NETWORK_S, partial(self._open, pod, pod.num_starts))

    def crashed(self, pod: Pod) -> None:
        self._gateway.remove(pod.name, "lost")

    def drains(self, pod: Pod) -> None:
        """Nothing more goes there, once another one can take over."""
        site = self._gateway.sites.get(pod.name)
        if site is None:
            self._platform.emptied(pod)
            return
        others = any(each.is_open for each in self._gateway.sites.values() if each is not site)
        self._events.after(0.0 if others else self._handover_timeout_s, partial(self._stop_sending, site))

    def gone(self, pod: Pod) -> None:
        self._gateway.remove(pod.name, "declined")

    def held(self) -> Mapping[str, EngineHeld]:
        return {site.name: held_by(site) for site in self._gateway.sites.values()}

    def num_in_system(self) -> int:
        return self._num_arrived - self._num_ended

    def _open(self, pod: Pod, start: int) -> None:
        if pod.phase == "ready" and pod.num_starts == start:
            self._gateway.open(pod.name, FastPod(self._limits, self._steps, overlaps=self._overlaps))
            self._release_leaving()

    def _release_leaving(self) -> None:
        """Another one can take over now."""
        for site in list(self._gateway.sites.values()):
            pod = self._platform.pods.get(site.name)
            if pod is not None and pod.phase == "draining":
                self._stop_sending(site)

    def _stop_sending(self, site: Site) -> None:
        if site.is_open:
            self._gateway.close(site)
        # What was sent before is there by then.
        self._events.after(4 * NETWORK_S, partial(self._look_whether_empty, site))

    def _look_whether_empty(self, site: Site) -> None:
        pod = self._platform.pods.get(site.name)
        if pod is not None and not site.is_open and not site.courses and self._gateway.sites.get(site.name) is site:
            self._platform.emptied(pod)

    # Requests.

    def _schedule_arrival(self, index: int) -> None:
        if index < len(self._workload.requests):
            self._events.at(self._workload.requests[index].arrival_s, partial(self._arrive, index))

    def _arrive(self, index: int) -> None:
        self._schedule_arrival(index + 1)
        if self._conversations.arrives(index):
            self._serve(index)

    def _serve(self, index: int) -> None:
        request = self._workload.requests[index]
        num_prompt_tokens = max(1, request.num_prompt_tokens)
        self._num_arrived += 1
        self._num_prompt_tokens += num_prompt_tokens
        max_tokens = max(1, request.num_output_tokens)
        self._gateway.arrives(Course(index, num_prompt_tokens, max_tokens, request.session, self._events.now_s))
        # Unless a pod on its way out has taken it.
        if not self._platform.wanted and self._gateway.num_held and not self._gateway.sites:
            self._controller.wake()

    def _ended(self, course: Course, ending: Ending) -> None:
        self._num_ended += 1
        self._event_log.ended(course.index, course.served(ending))
        following = self._conversations.ended(course.index, [], [])
        if following is not None:
            self._events.after(0.0, partial(self._serve, following))

    # What the policy sees.

    def _see(self) -> Seen:
        gateway, now = self._gateway, self._events.now_s
        gateway.refresh()
        live = [pod for pod in self._platform.pods.values() if pod.live]
        names = {pod.name for pod in live}
        num_sampled = sum(site.pod.num_sampled_tokens for site in gateway.sites.values())
        load = deployment_load(gateway, self._platform.pods, self._limits, self._steps, now)
        return Seen(
            at_s=now,
            wanted=self._platform.wanted,
            pods=tuple(self._pod_seen(pod) for pod in live),
            num_on_leaving=sum(len(site.courses) for site in gateway.sites.values() if site.name not in names),
            num_held=gateway.num_held,
            num_arrived=self._num_arrived,
            num_prompt_tokens_arrived=self._num_prompt_tokens,
            num_output_tokens_made=gateway.num_sampled_gone + num_sampled,
            signals=merge([View(load)], self._platform.fleet(), num_gateways=1, at_s=now),
        )

    def _pod_seen(self, pod: Pod) -> PodSeen:
        site = self._gateway.sites.get(pod.name)
        if site is None:
            return PodSeen(pod.name, is_ready=False)
        load = site.pod.report()
        usage = load.num_blocks_active / self._limits.num_blocks
        return PodSeen(pod.name, True, load.num_running, load.num_waiting, usage)
