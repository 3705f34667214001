"""Sleeping and waking replicas: capacity comes first, starting replicas are kept, and nothing alternates."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_reports import reported
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_world import arrivals, engines, signals

from examples import num_examples
from pagemill_crds.sections.autoscaling import AutoscalingSection
from pagemill_operator.autoscaler.demand import DemandPolicy
from pagemill_operator.autoscaler.memory import Memory
from pagemill_operator.autoscaler.settings import ScalingSettings, settings_of
from pagemill_operator.autoscaler.signals import Fleet
from pagemill_operator.backends.rollout import next_actions
from pagemill_operator.backends.standby import next_standby_actions
from pagemill_operator.plan import Group, Plan, Process
from pagemill_operator.status.conditions import Phase, ReplicaObservation
from pagemill_protocol.report.load import Lengths, QueueLoad
from pagemill_protocol.resource.served import ServedModel

PROCESS = Process("module", {})
WAKING: Phase = "waking"
ASLEEP: Phase = "asleep"


def plan(replicas: int, warm: int = 1, most: int = 10, **changes: Any) -> Plan:
    policy = ScalingSettings("Active", 0, most, warm, 0.8, 2)
    group = Group("g", replicas, PROCESS, digest="new")
    return Plan("default", "g", 1, ServedModel(name="g"), "m", (group,), msgspec.structs.replace(policy, **changes))


def replicas(**phases: Phase) -> list[ReplicaObservation]:
    return [ReplicaObservation(name, phase, "new") for name, phase in phases.items()]


@pytest.mark.parametrize(
    ("wanted", "warm", "most", "standby"),
    [(0, 1, 1, 1), (1, 1, 1, 0), (1, 1, 2, 1), (1, 3, 2, 1), (2, 0, 9, 0), (0, 2, 9, 2), (9, 2, 9, 0)],
)
def test_standby_replicas_and_serving_ones_do_not_exceed_the_maximum(
    wanted: int, warm: int, most: int, standby: int
) -> None:
    assert plan(wanted, warm, most).standby == standby
    assert plan(wanted, warm, most).all_replicas == wanted + standby


@pytest.mark.parametrize("mode", ["Advisory", "External"])
def test_without_an_active_operator_no_replica_stands_by(mode: str) -> None:
    section: dict[str, Any] = {"mode": mode, "maxReplicas": 3}
    policy = settings_of(AutoscalingSection.model_validate({**section, **({"warm": 1} if mode == "Advisory" else {})}))
    assert policy is None or policy.standby(1) == 0


def test_a_sleeping_replica_is_woken_if_it_serves_first() -> None:
    seen = replicas(a="ready", b="asleep", c="asleep", d="loading")
    assert next_standby_actions(plan(2, warm=2), seen) == (["b"], [])
    assert next_standby_actions(plan(9, warm=2), seen) == (["b", "c"], [])
    assert next_standby_actions(plan(0), replicas(a="asleep")) == ([], [])
    assert next_standby_actions(plan(1), replicas(a="asleep")) == (["a"], [])


def test_a_waking_replica_counts_so_that_no_second_one_is_woken() -> None:
    assert next_standby_actions(plan(1, warm=2), replicas(a="waking", b="asleep")) == ([], [])


def test_the_emptiest_replica_beyond_the_required_number_sleeps() -> None:
    held = {"a": reported("a", 0, 0), "b": reported("b", 9, 1), "c": reported("c", 3, 1)}
    assert next_standby_actions(plan(2), replicas(a="ready", b="ready", c="ready"), held) == ([], ["a"])
    assert next_standby_actions(plan(1), replicas(b="ready", c="ready"), held) == ([], ["c"])
    assert next_standby_actions(plan(0), replicas(b="ready")) == ([], ["b"])


def test_of_equally_empty_replicas_the_one_that_became_ready_last_sleeps() -> None:
    """After a crash, the woken replica serves; the crashed one is ready again and is the older one."""
    started_anew = ReplicaObservation("a", "ready", "new", ready_at=20.0)
    woken = ReplicaObservation("b", "ready", "new", ready_at=10.0)
    empty = {name: reported(name, 0, 0) for name in "ab"}
    for held in ({}, empty, {"b": empty["b"]}):
        assert next_standby_actions(plan(1), [started_anew, woken], held) == ([], ["a"])
        assert next_standby_actions(plan(1), [woken, started_anew], held) == ([], ["a"])


def test_a_replica_unknown_to_gateways_sleeps_before_one_that_serves() -> None:
    held = {"b": reported("b", 9, 1)}
    assert next_standby_actions(plan(1), replicas(a="ready", b="ready"), held) == ([], ["a"])
    assert next_standby_actions(plan(1), replicas(b="ready", c="ready"), held) == ([], ["c"])


def test_a_waking_replica_does_not_send_a_ready_one_to_sleep() -> None:
    assert next_standby_actions(plan(1), replicas(a="ready", b="waking")) == ([], [])


def test_no_more_replicas_sleep_than_the_configured_standby() -> None:
    assert next_standby_actions(plan(1, warm=0), replicas(a="ready", b="ready")) == ([], [])
    assert next_standby_actions(plan(1), replicas(a="ready", b="ready", c="asleep")) == ([], [])


def test_during_a_rollout_no_replica_is_put_to_sleep_but_one_may_be_woken() -> None:
    seen = [*replicas(a="ready", b="ready"), ReplicaObservation("old", "asleep", "old")]
    assert next_standby_actions(plan(1), seen) == ([], [])
    assert next_standby_actions(plan(3), seen) == (["old"], [])


def test_without_a_scaler_a_sleeping_engine_was_put_to_sleep_by_a_user() -> None:
    fixed = Plan("default", "g", 1, ServedModel(name="g"), "m", (Group("g", 1, PROCESS, digest="new"),))
    assert next_standby_actions(fixed, replicas(a="asleep")) == ([], [])


def test_of_excess_replicas_sleeping_ones_are_removed_before_starting_and_serving_ones() -> None:
    group = Group("g", 1, PROCESS, digest="new")
    seen = replicas(a="ready", b="asleep", c="loading", d="crashed")
    assert next_actions(group, seen, standby=2) == (0, ["d"])
    assert next_actions(group, seen, standby=1) == (0, ["d", "b"])
    assert next_actions(group, seen) == (0, ["d", "b", "c"])


def test_old_sleeping_replicas_are_replaced_like_serving_ones() -> None:
    group = Group("g", 0, PROCESS, digest="new", max_surge=1)
    old = [ReplicaObservation("old", "asleep", "old")]
    assert next_actions(group, old, standby=1) == (1, []), "the replica could still be woken"
    assert next_actions(group, [*old, *replicas(a="loading")], standby=1) == (0, [])
    assert next_actions(group, [*old, *replicas(a="ready")], standby=1) == (0, ["old"])


class World:
    """Replicas that follow orders with a delay."""

    def __init__(self, warm: int, most: int) -> None:
        self.warm, self.most = warm, most
        self.seen: dict[str, Phase] = {}
        self.served: dict[str, int] = {}
        """The load of each replica, which grows with the time that it has served."""
        self._count = 0

    def act(self, wanted: int) -> tuple[list[str], list[str]]:
        """Run one reconcile; return the replicas that were woken and put to sleep."""
        target = plan(wanted, self.warm, self.most)
        seen = [ReplicaObservation(name, phase, "new") for name, phase in self.seen.items()]
        held = {name: reported(name, self.served.get(name, 0), 1) for name in self.seen}
        actions = next_actions(target.groups[0], seen, held, target.standby)
        self.check_removed(actions.drain)
        staying = [replica for replica in seen if replica.name not in actions.drain]
        orders = next_standby_actions(target, staying, held)
        self.check(target, {replica.name: replica.phase for replica in staying}, orders.wake, orders.sleep)
        for name in actions.drain:
            del self.seen[name]
        for _ in range(actions.start):
            self._count += 1
            self.seen[f"r{self._count}"] = "starting"
        for names, phase in ((orders.wake, WAKING), (orders.sleep, ASLEEP)):
            self.seen |= dict.fromkeys(names, phase)
        # Requests wait for the waking replicas.
        self.served |= dict.fromkeys(orders.wake, 1)
        return orders.wake, orders.sleep

    def pass_time(self, lucky: list[bool]) -> None:
        following: dict[Phase, Phase] = {"starting": "loading", "loading": "ready", "waking": "ready"}
        for name, moves in zip(list(self.seen), lucky, strict=False):
            if moves:
                self.seen[name] = following.get(self.seen[name], self.seen[name])
        self.served = {
            name: self.served.get(name, 0) + 1 for name, phase in self.seen.items() if phase in ("ready", "waking")
        }

    def check(self, target: Plan, phases: dict[str, Phase], wake: list[str], sleep: list[str]) -> None:
        assert not (wake and sleep)
        assert all(phases[name] == "asleep" for name in wake)
        assert all(phases[name] == "ready" for name in sleep), "a starting replica must be kept"
        ready = sum(phase == "ready" for phase in phases.values())
        waking = sum(phase == "waking" for phase in phases.values())
        assert not sleep or ready - len(sleep) >= target.replicas, "required capacity must never be put to sleep"
        assert ready + waking + len(wake) >= min(target.replicas, ready + waking + self._asleep(phases))
        assert len(sleep) == 0 or self._asleep(phases) + len(sleep) <= target.standby

    def check_removed(self, names: list[str]) -> None:
        left = {name: phase for name, phase in self.seen.items() if name not in names}
        if any(self.seen[name] in ("starting", "loading") for name in names):
            assert not self._asleep(left), "a start must not be cancelled while a replica sleeps"

    def _asleep(self, phases: dict[str, Phase]) -> int:
        return sum(phase == "asleep" for phase in phases.values())


@settings(max_examples=num_examples(150), deadline=None)
@given(
    warm=st.integers(0, 3),
    most=st.integers(1, 6),
    turns=st.lists(st.tuples(st.integers(0, 6), st.lists(st.booleans(), max_size=10)), max_size=12),
    last=st.integers(0, 6),
)
def test_whatever_was_required_before_the_state_becomes_stable(
    warm: int, most: int, turns: list[tuple[int, list[bool]]], last: int
) -> None:
    warm = min(warm, most)
    world = World(warm, most)
    for wanted, lucky in turns:
        world.act(min(wanted, most))
        world.pass_time(lucky)
    last = min(last, most)
    woken: set[str] = set()
    for _ in range(12):
        wake, sleep = world.act(last)
        assert not woken & set(sleep), "a replica woken for a number must not sleep again for the same number"
        woken |= set(wake)
        world.pass_time([True] * 20)
    phases = sorted(world.seen.values())
    assert phases == ["asleep"] * plan(last, warm, most).standby + ["ready"] * last
    assert world.act(last) == ([], [])
    assert sorted(world.seen.values()) == phases


@settings(max_examples=num_examples(60), deadline=None)
@given(st.integers(0, 5), st.floats(0, 8), st.integers(0, 60), st.integers(1, 4))
def test_a_sleeping_replica_is_not_counted_as_capacity(ready: int, active: float, waiting: int, asleep: int) -> None:
    """Lengths are not known, so the reason does not say how soon a replica could serve."""
    policy = ScalingSettings("Active", 0, 10, 3, 0.8, 2)
    queue = QueueLoad(num_requests=waiting, num_tokens=100 * waiting)
    loaded = engines(ready, active=active)
    awake = signals(ready, engines=loaded, queue=queue, arrivals=arrivals(1.0), lengths=Lengths())
    dozing = msgspec.structs.replace(awake, fleet=msgspec.structs.replace(awake.fleet, asleep=asleep))
    without, memory = DemandPolicy().decide(policy, awake, Memory())
    beside, same_memory = DemandPolicy().decide(policy, dozing, Memory())
    assert (without.replicas, without.reason, without.demand) == (beside.replicas, beside.reason, beside.demand)
    assert memory == same_memory


def test_a_decision_says_how_many_replicas_only_wake() -> None:
    policy = ScalingSettings("Active", 0, 10, 2, 0.8, 2)
    fleet = Fleet(wanted=1, ready=1, asleep=2)
    decision, _ = DemandPolicy().decide(
        policy, signals(1, fleet=fleet, engines=engines(1, active=1.0, waiting=8), lengths=Lengths()), Memory()
    )
    assert decision.replicas == 4
    assert decision.message.endswith("; 2 of 3 only wake up")


def test_a_standby_is_woken_for_a_queue_that_ends_before_another_could_start() -> None:
    policy = ScalingSettings("Active", 1, 10, 1, queue_depth=2)
    waiting = {"engines": engines(1, waiting=200), "arrivals": arrivals(1.0)}
    alone, _ = DemandPolicy().decide(policy, signals(1, **waiting, fleet=Fleet(wanted=1, ready=1)), Memory())
    beside, _ = DemandPolicy().decide(policy, signals(1, **waiting, fleet=Fleet(wanted=1, ready=1, asleep=1)), Memory())
    assert (alone.replicas, beside.replicas > 1) == (1, True)
