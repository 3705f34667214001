"""The gateway of a fleet in fast-forward: who goes where, who waits, and what becomes of them.

The queue, the learned lengths of answers, the traffic's numbers and the bounds on attempts are the gateway's own code;
choice and room are `fast_routing`. What takes messages there (reports, acceptance) is known here at once. Neighbours:
`fast` reports requests to it, and pods that come and go, `fast_pod` runs what it sends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import islice

from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_gateway.admission.attempts import Attempts
from pagemill_gateway.admission.fair_queue import FairQueue
from pagemill_gateway.admission.output_tokens import OutputTokens
from pagemill_gateway.admission.reservations import Need
from pagemill_gateway.brain.interface import FailureKind, RequestOutcome
from pagemill_gateway.brain.load.traffic import TrafficMeter
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.routing.policies import RoutingPolicies
from pagemill_gateway.routing.policy import RequestView
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.fast_course import Course, Site, Waiting
from pagemill_simulator.fleet.fast_pod import FastPod, PodLoad
from pagemill_simulator.fleet.fast_routing import PodTable
from pagemill_simulator.fleet.fast_row import Row
from pagemill_simulator.fleet.outcome import Ending
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.pod import FRAME_INTERVAL_S, NETWORK_S

DEPLOYMENT = "sim"
BYTES_PER_TOKEN = 4
"""Of a request's body."""
ROUNDING_S = 1e-9
"""What is a network's time away is here, whatever was lost in adding and subtracting that."""
PAID_PRIORITY = -1
"""What goes on elsewhere is due at once."""


class FastGateway:
    def __init__(
        self,
        events: Events,
        settings: FleetSettings,
        limits: SchedulerLimits,
        table: PodTable,
        *,
        prefix_chunk_tokens: int,
        ended: Callable[[Course, Ending], None],
        emptied: Callable[[Site], None],
    ) -> None:
        """`ended` gets every request once, `emptied` each pod whose last one has left."""
        self._events = events
        self._settings = settings
        self._limits = limits
        self._table = table
        self._prefix_chunk_tokens = prefix_chunk_tokens
        self._ended = ended
        self._emptied = emptied
        self._rng = random.Random(f"{settings.seed} gateway")
        policies = RoutingPolicies(settings.routing_policy, GatewayConfig().routing_session_ms)
        self._policy = None if settings.routing_policy == "Cost" else policies.named(settings.routing_policy)
        """None: the default one, which the table knows by heart."""
        self._queue: FairQueue[Waiting] = FairQueue(settings.queue.max_requests, settings.queue.max_bytes)
        self._output_tokens = OutputTokens()
        self._places: dict[int, dict[Site, None]] = {}
        """Where turns of a session were computed."""
        self._unreported: dict[Course, None] = {}
        """Of all sites."""
        self._by_slot: dict[int, Site] = {}
        self.sites: dict[str, Site] = {}
        """By name, draining ones too."""
        self.traffic = TrafficMeter(events.now)
        self.traffic.keep({DEPLOYMENT})
        self.num_sampled_gone = 0
        """Tokens that pods had made that are gone."""

    @property
    def num_held(self) -> int:
        return len(self._queue)

    @property
    def queue(self) -> FairQueue[Waiting]:
        return self._queue

    # -- pods ----------------------------------------------------------------------------------------------------

    def open(self, name: str, pod: FastPod) -> Site:
        """It may get requests from now on."""
        site = self.sites[name] = Site(name, pod, self._table.open(pod.load()))
        self._by_slot[site.slot] = site
        for waiting in list(self._queue):
            self._asks(waiting.course)
        self._pump(site)
        return site

    def close(self, site: Site) -> None:
        """It gets none any more; what is there stays."""
        site.is_open = False
        self._table.close(site.slot)

    def remove(self, name: str, kind: FailureKind) -> None:
        """It is gone; a moment later that is known, and what it did not end goes on elsewhere."""
        site = self.sites.pop(name, None)
        if site is None:
            return
        now = self._events.now_s
        self.close(site)
        site.pod.advance(now)
        while site.pod.ended and site.pod.ended[0].end_s <= now:
            self._read(site, site.pod.ended.popleft())
        cut = site.pod.cut(now)
        self.num_sampled_gone += site.pod.num_sampled_tokens
        site.looked_at_s = math.inf
        self._events.after(NETWORK_S, partial(self._cut, site, cut, kind))

    def refresh(self) -> None:
        """Bring all pods up to this instant."""
        for site in self.sites.values():
            self._look(site)

    # -- requests ------------------------------------------------------------------------------------------------

    def arrives(self, course: Course) -> None:
        """It asks for an engine."""
        room = self._limits.max_total_tokens - course.num_prompt_tokens
        if room < 1 or course.num_prompt_tokens >= self._limits.max_model_len:
            self._ended(course, "refused")
            return
        course.max_tokens = min(course.max_tokens, room)
        if self._is_any_open():
            self._asks(course)
        if len(self._queue) or not self._place(course):
            self._hold(course)

    def _is_any_open(self) -> bool:
        return any(site.is_open for site in self.sites.values())

    def _hold(self, course: Course) -> None:
        now, limits = self._events.now_s, self._settings.queue
        waiter = course.waiter = Waiting(
            key="",
            priority=PAID_PRIORITY if course.was_sent else 0,
            cost_tokens=0,
            num_bytes=course.num_prompt_tokens * BYTES_PER_TOKEN,
            arrived_at=course.arrival_s,
            expires_at=now + max(0.0, limits.timeout_s - course.waited_s),
            group="",
            course=course,
            entered_s=now,
        )
        for gone in self._queue.add(waiter):
            gone.course.waiter = None
            self._turn_away(gone.course)
        if course.waiter is not None and limits.timeout_s < math.inf:
            self._events.at(waiter.expires_at, partial(self._expire, waiter))

    def _expire(self, waiter: Waiting) -> None:
        if waiter.course.waiter is waiter:
            self._queue.remove(waiter)
            waiter.course.waiter = None
            self._turn_away(waiter.course)

    def _turn_away(self, course: Course) -> None:
        self._ended(course, "lost" if course.was_sent else "refused")

    def _pump(self, site: Site) -> None:
        """Whoever waits and finds room goes, in their order; only at `site` something has changed."""
        queue = self._queue
        while (waiter := queue.first()) is not None:
            course = waiter.course
            least = self._asks(course).with_cached(course.num_prompt_tokens)
            if not self._table.fits(site.slot, least) or not self._place(course):
                return
            queue.take(waiter)
            course.waiter, course.waited_s = None, course.waited_s + self._events.now_s - waiter.entered_s

    def _place(self, course: Course) -> bool:
        """Send it where it costs least; False: there is no room."""
        if not self._is_any_open():
            return False
        need = self._asks(course)
        cached = self._cached(course)
        self._note_first_tokens()
        slot = self._choose(course, need, cached)
        if slot is None:
            return False
        need = need.with_cached(cached.get(slot, 0))
        course.num_uncached_tokens = need.num_uncached_tokens
        course.decision = self._table.account(slot, need)
        self._send(course, self._by_slot[slot])
        return True

    def _choose(self, course: Course, need: Need, cached: dict[int, int]) -> int | None:
        num_tokens, mean = course.num_prompt_tokens + course.num_made, self._output_tokens.mean
        if self._policy is None:
            return self._table.choose(num_tokens, mean, need, cached)
        # Prompts of one session begin alike, others do not.
        key = f"{course.index if course.session is None else course.session} {course.session is None}".encode()
        view = RequestView(num_tokens, mean, key, self._rng.random())
        return self._table.choose_by(self._policy, view, need, cached)

    def _asks(self, course: Course) -> Need:
        """What it needs as if nothing of its prompt were cached; what there is of the answer is part of it."""
        if course.need is not None:
            return course.need
        num_prompt_tokens, max_tokens = course.num_prompt_tokens, course.max_tokens
        if not course.is_counted:
            course.is_counted = True
            self.traffic.arrived(DEPLOYMENT, num_prompt_tokens, course.arrival_s)
        expected = max(self._output_tokens.expect(max_tokens), course.num_made + 1)
        num_output_tokens = max(1, min(expected, self._limits.max_model_len - num_prompt_tokens))
        course.need = Need(num_prompt_tokens, num_prompt_tokens, num_output_tokens, 1, max_tokens)
        return course.need

    def _cached(self, course: Course) -> dict[int, int]:
        """Leading tokens of its prompt that pods have, by slot; the last one is always computed."""
        if course.session is None or course.session not in self._places:
            return {}
        prefix_chunk, found = self._prefix_chunk_tokens, {}
        most = (course.num_prompt_tokens - 1) // prefix_chunk
        for site in self._places[course.session]:
            kv = site.pod.kv
            num_prefix_chunks = min(most, kv.num_cached_of(course.session) * kv.block_size // prefix_chunk)
            if num_prefix_chunks and site.is_open:
                found[site.slot] = num_prefix_chunks * prefix_chunk
        return found

    def _send(self, course: Course, site: Site) -> None:
        there_s = self._events.now_s + NETWORK_S
        course.site, course.was_sent = site, True
        site.courses[course] = None
        num_made = course.num_made
        row = Row(there_s, course.num_prompt_tokens + num_made, course.max_tokens - num_made, course.session, course)
        course.row = row
        site.unaccepted.append((there_s + NETWORK_S, course.decision))
        site.unreported.append(course)
        self._unreported[course] = None
        site.pod.advance(there_s)
        site.pod.add(row, there_s)
        self._plan(site)

    def _note_first_tokens(self) -> None:
        """Whose first token is here has nothing left to compute, whatever its pod has reported."""
        reported_s = self._events.now_s - NETWORK_S
        for course in list(self._unreported):
            if course.row is not None and course.row.first_token_s <= reported_s and course.site is not None:
                del self._unreported[course]
                course.site.unreported.remove(course)
                self._table.computed(course.site.slot, course.num_uncached_tokens)

    # -- what pods tell ------------------------------------------------------------------------------------------

    def _plan(self, site: Site) -> None:
        """The pod is looked at again when it has news."""
        look_s = site.pod.next_news_s() + NETWORK_S
        if look_s != site.looked_at_s:
            site.looked_at_s = look_s
            if look_s < math.inf:
                self._events.at(look_s, partial(self._look_in_time, site, look_s))

    def _look_in_time(self, site: Site, look_s: float) -> None:
        if site.looked_at_s == look_s:
            site.looked_at_s = math.inf
            self._look(site)

    def _look(self, site: Site) -> None:
        """What is here by now."""
        reported_s = self._events.now_s - NETWORK_S + ROUNDING_S
        pod, has_ended = site.pod, False
        pod.advance(reported_s)
        while pod.ended and pod.ended[0].end_s <= reported_s:
            self._read(site, pod.ended.popleft())
            has_ended = True
        self._plan(site)
        self._tell(site)
        if has_ended:
            self._pump(site)
            if not site.courses:
                self._emptied(site)

    def _tell(self, site: Site) -> None:
        """The pod has changed a network's time ago: it reports that, but not more often than it may."""
        if site.is_report_due or site.pod.is_starting:
            return
        changed_s = self._events.now_s - NETWORK_S
        due_s = site.reported_s + FRAME_INTERVAL_S
        if due_s < changed_s:
            # One that works reports all the time.
            late_s = (changed_s - due_s) % FRAME_INTERVAL_S
            due_s = changed_s if site.was_idle else changed_s + FRAME_INTERVAL_S - late_s
        if due_s <= changed_s:
            self._report(site)
        else:
            site.is_report_due = True
            self._events.at(due_s + NETWORK_S, partial(self._report, site))

    def _report(self, site: Site) -> None:
        left_s = self._events.now_s - NETWORK_S
        site.pod.advance(left_s)
        pod = site.pod
        site.reported_s, site.was_idle = left_s, not pod.has_work
        self._settle(site)
        # While it decides each step it has more to tell soon, and a request is believed to be there by reports alone.
        site.is_report_due = pod.has_work and (
            pod.has_more_to_report or self._table.reserved(site.slot).num_unseen_blocks > 0
        )
        if site.is_report_due:
            self._events.after(FRAME_INTERVAL_S, partial(self._report, site))
        self._believe(site, pod.report())
        self._pump(site)

    def _believe(self, site: Site, load: PodLoad) -> None:
        """A report names no request: of those that it does not count, the newest are taken to be missing in it."""
        for course in site.unreported:
            del self._unreported[course]
        site.unreported.clear()
        num_missing = len(site.courses) - load.num_running - load.num_waiting
        if num_missing > 0:
            reported_s = self._events.now_s - NETWORK_S
            for course in islice(reversed(site.courses), num_missing):
                if course.row is not None and course.row.first_token_s > reported_s:
                    site.unreported.append(course)
                    self._unreported[course] = None
        num_tokens = sum(course.num_uncached_tokens for course in site.unreported)
        self._table.observe(site.slot, load, len(site.unreported), num_tokens)

    def _settle(self, site: Site) -> None:
        """A report shows what was accepted before."""
        now, reserved = self._events.now_s, self._table.reserved(site.slot)
        for accepted_s, decision in site.unaccepted:
            if accepted_s <= now:
                reserved.accepted(decision)
        site.unaccepted = [each for each in site.unaccepted if each[0] > now]
        reserved.reported()

    def _read(self, site: Site, row: Row) -> None:
        """Its answer is complete."""
        course = row.client
        assert isinstance(course, Course)
        self._note_tokens(course, row, course.max_tokens - course.num_made, row.end_s)
        self._leave(course)
        if course.session is not None:
            self._places.setdefault(course.session, {})[site] = None
        self._output_tokens.ended(course.num_made, course.max_tokens)
        served = course.served("served")
        self.traffic.record_outcome(
            RequestOutcome(
                DEPLOYMENT,
                course.num_prompt_tokens,
                course.num_cached_tokens,
                course.num_made,
                served.ttft_ms,
                served.tpot_ms,
            )
        )
        self._ended(course, "served")

    def _note_tokens(self, course: Course, row: Row, num_made: int, last_s: float) -> None:
        if not num_made:
            return
        if course.first_token_s is None:
            course.first_token_s, course.num_cached_tokens = row.first_token_s + NETWORK_S, row.num_cached_tokens
        course.num_made += num_made
        course.last_token_s = last_s + NETWORK_S

    def _leave(self, course: Course) -> None:
        assert course.site is not None
        if course in self._unreported:
            del self._unreported[course]
            course.site.unreported.remove(course)
        self._table.release(course.site.slot, course.decision)
        del course.site.courses[course]
        course.site = course.row = None

    def _cut(self, site: Site, cut: list[tuple[Row, int]], kind: FailureKind) -> None:
        """The connections to a pod have ended."""
        for row, num_made in cut:
            course = row.client
            assert isinstance(course, Course)
            self._note_tokens(course, row, num_made, self._events.now_s - NETWORK_S)
            self._leave(course)
            if self._is_over(course, kind, progressed=num_made > 0):
                self._turn_away(course)
                continue
            course.need = None
            if not self._place(course):
                self._hold(course)
        self._table.forget(site.slot)
        for places in self._places.values():
            places.pop(site, None)

    def _is_over(self, course: Course, kind: FailureKind, *, progressed: bool) -> bool:
        """As the relay: whether it may not be tried again."""
        if course.attempts is None:
            course.attempts = Attempts(self._settings.max_attempts, uniform=self._rng.uniform)
        if progressed:
            course.attempts.progressed()
        if kind == "declined":
            course.attempts.declined("gone")
        else:
            course.attempts.ended("lost", crashed=kind == "crashed")
        return course.attempts.exhausted
