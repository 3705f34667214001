"""A deployment under the autoscaler with a clock that the test controls: engines of one size, and the test's load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from pagemill_operator.autoscaler.decision import Decision
from pagemill_operator.autoscaler.policy import ask
from pagemill_operator.autoscaler.records import Record, decode_record, encode_record, replay
from pagemill_operator.autoscaler.registry import find_policy
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Activity, Fleet, Signals
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import Arrivals, EnginesLoad, Lengths, QueueLoad
from pagemill_protocol.report.state import StepTimeParams

BLOCKS, BLOCK_SIZE, SEATS = 1000, 16, 64
STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[10.0, 14.0, 60.0], num_steps_observed=1000)
"""About 7,000 prompt tokens per second."""
LENGTHS = Lengths(
    truth="value",
    prompt=histogram_of([500.0] * 100),
    computed=histogram_of([500.0] * 100),
    output=histogram_of([200.0] * 100),
)


def engines(replicas: int, *, active: float = 0.0, running: int = 0, waiting: int = 0, **fields: Any) -> EnginesLoad:
    """Return the engines' load; `active` are the used blocks of all engines, in units of one replica's blocks."""
    known = {
        "truth": "value",
        "num_reporting": replicas,
        "num_kv_bytes_total": replicas * BLOCKS,
        "num_kv_bytes_active": min(replicas * BLOCKS, round(active * BLOCKS)),
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": SEATS,
        "max_step_tokens": 512,
        "step_time": STEP_TIME,
    }
    return EnginesLoad(**(known | fields))


def arrivals(rate: float, *, burst: float | None = None, idle_s: float = 0.0) -> Arrivals:
    return Arrivals(
        truth="value",
        window_s=60.0,
        requests_per_s=rate,
        burst_window_s=6.0,
        burst_requests_per_s=rate if burst is None else burst,
        idle_s=idle_s,
    )


def signals(replicas: int, *, at_s: float = 1000.0, **fields: Any) -> Signals:
    known: dict[str, Any] = {
        "num_reporting": 1,
        "engines": engines(replicas),
        "arrivals": arrivals(0.0),
        "lengths": LENGTHS,
        "fleet": Fleet(wanted=replicas, ready=replicas),
    }
    return Signals(at_s=at_s, **(known | fields))


class Scaled:
    """Replicas that start when they are required and are ready after `cold_start_s`; decisions are replayed."""

    def __init__(
        self, settings: ScalingSettings, *, replicas: int = 1, cold_start_s: float = 30.0, lengths: Lengths = LENGTHS
    ) -> None:
        """Create the deployment; without `lengths`, the time in which the queue is served is unknown."""
        self.settings = settings
        self.lengths = lengths
        self.policy = find_policy(settings.policy)
        self.now = 1000.0
        self.memory = self.policy.memory_type()
        self.activity: Activity | None = None
        """With it, `idle_s` of the arrivals must follow the clock."""
        self.wanted = replicas
        self.cold_start_s = cold_start_s
        self.ready_at = [-math.inf] * replicas
        self.decisions: list[Decision] = []
        self.records: list[Record] = []

    @property
    def ready(self) -> int:
        return sum(at <= self.now for at in self.ready_at)

    @property
    def changes(self) -> list[tuple[int, int]]:
        return [(each.replicas_before, each.replicas) for each in self.decisions if each.changes]

    def decide(self, **load: Any) -> Decision:
        """Decide with these fields of the signals; `active`, `running`, `waiting` and `rate` are abbreviations."""
        starting = len(self.ready_at) - self.ready
        fleet = Fleet(
            wanted=self.wanted,
            ready=self.ready,
            loading=starting,
            starting_s=max((self.cold_start_s - (at - self.now) for at in self.ready_at if at > self.now), default=0.0),
            cold_start_s=self.cold_start_s,
        )
        shown = {name: load.pop(name) for name in ("active", "running", "waiting") if name in load}
        if "rate" in load:
            load["arrivals"] = arrivals(load.pop("rate"), burst=load.pop("burst", None))
        known = {"engines": engines(self.ready, **shown), "fleet": fleet, "lengths": self.lengths}
        seen = signals(self.ready, at_s=self.now, **(known | load))
        seen = seen if self.activity is None else self.activity.seen(seen)
        before = self.memory
        decision, self.memory = ask(self.policy, self.settings, seen, before)
        self.records.append(Record("ns/d", "2026-01-01T00:00:00Z", self.settings, seen, before, decision))
        if len(self.decisions) % 10 == 0:
            self._replay(self.records[-1])
        self.decisions.append(decision)
        self._order(decision.replicas)
        return decision

    def run(self, seconds: float, load: Callable[[float, int], dict[str, Any]], *, step_s: float = 2.0) -> None:
        """Run for some seconds; `load` returns fields of the signals for a time in seconds and the ready replicas."""
        start, end = self.now, self.now + seconds
        while self.now < end:
            self.decide(**load(self.now - start, self.ready))
            self.now += step_s

    def _replay(self, record: Record) -> None:
        again = replay(decode_record(encode_record(record)))
        assert msgspec.json.encode(again) == msgspec.json.encode(record.decision), "a record must be replayed equally"

    def _order(self, replicas: int) -> None:
        while len(self.ready_at) < replicas:
            self.ready_at.append(self.now + self.cold_start_s)
        self.ready_at = sorted(self.ready_at)[:replicas]
        self.wanted = replicas


def busy(demand: float, ready: int, *, running: int = 8) -> dict[str, Any]:
    """Return the load for this number of replicas; what exceeds the ready ones waits in the gateway."""
    waiting = max(0.0, demand - ready)
    queue = QueueLoad(num_requests=math.ceil(waiting * 4), num_tokens=round(waiting * BLOCKS * BLOCK_SIZE))
    return {"active": min(demand, ready), "running": running, "queue": queue, "rate": demand}
