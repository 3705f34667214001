"""Replacement and scaling keep the bounds at every step and always end in the required state."""

from __future__ import annotations

from engine_reports import reported
from hypothesis import given
from hypothesis import strategies as st

from pagemill_operator.backends.rollout import next_actions
from pagemill_operator.plan import Group, Process
from pagemill_operator.status.conditions import Phase, ReplicaObservation

PROCESS = Process("module", {})


def group(replicas: int, surge: int = 1, unavailable: int = 0) -> Group:
    return Group("g", replicas, PROCESS, digest="new", max_surge=surge, max_unavailable=unavailable)


def replica(name: str, phase: Phase = "ready", digest: str = "new") -> ReplicaObservation:
    return ReplicaObservation(name, phase, digest)


def test_without_running_replicas_all_are_started_at_once() -> None:
    assert next_actions(group(3), []) == (3, [])


def test_in_the_required_state_nothing_is_done() -> None:
    assert next_actions(group(2), [replica("a"), replica("b")]) == (0, [])


def test_a_replacement_surges_by_one_and_waits_for_readiness() -> None:
    old = [replica("a", digest="old"), replica("b", digest="old")]
    assert next_actions(group(2), old) == (1, [])
    assert next_actions(group(2), [*old, replica("c", "loading")]) == (0, [])
    assert next_actions(group(2), [*old, replica("c")]) == (1, ["a"])


def test_without_surge_one_replica_is_removed_first() -> None:
    old = [replica("a", digest="old"), replica("b", digest="old")]
    assert next_actions(group(2, surge=0, unavailable=1), old) == (1, ["a"])


def test_old_replicas_without_requests_are_removed_at_once() -> None:
    old = [replica("a", "crashed", "old"), replica("b", "loading", "old")]
    start, drain = next_actions(group(2), old)
    assert drain == ["a", "b"]
    assert start == 2


def test_scaling_down_removes_unready_replicas_then_the_youngest() -> None:
    running = [replica("a"), replica("b", "loading"), replica("c")]
    assert next_actions(group(2), running) == (0, ["b"])
    assert next_actions(group(1), running) == (0, ["b", "c"])
    assert set(next_actions(group(0), running).drain) == {"a", "b", "c"}


def test_scaling_down_removes_the_emptiest_ready_replicas() -> None:
    running = [replica("a"), replica("b"), replica("c"), replica("d", "loading")]
    held = {"a": reported("a", 0, 0), "b": reported("b", 7, 2), "c": reported("c", 9, 1)}
    assert next_actions(group(3), running, held) == (0, ["d"])
    assert next_actions(group(1), running, held) == (0, ["d", "a", "b"])
    assert next_actions(group(2), running[:3], {"a": held["a"]}) == (0, ["a"]), "the others have not reported"


PHASES: list[Phase] = ["starting", "loading", "ready", "crashed", "draining"]
REPLICAS = st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from(["new", "old"])), max_size=8)


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), REPLICAS)
def test_bounds_hold_and_every_rollout_ends(
    wanted: int, surge: int, unavailable: int, phases: list[tuple[Phase, str]]
) -> None:
    target = group(wanted, surge, unavailable)
    replicas = [replica(f"r{i}", phase, digest) for i, (phase, digest) in enumerate(phases)]
    for round_ in range(30):
        start, drain = next_actions(target, replicas)
        live = [r for r in replicas if r.phase not in ("draining", "gone")]
        ready = [r for r in live if r.phase == "ready"]
        assert start + len(live) - len(drain) <= max(wanted + target.surge, len(live))
        left = sum(r.name not in drain for r in ready)
        assert left >= min(len(ready), wanted - target.unavailable)
        kept = [r for r in live if r.name not in drain]
        if not start and not drain and all(r.phase == "ready" for r in kept):
            assert [r.digest for r in kept] == ["new"] * wanted
            return
        # In each step, draining replicas end and starting ones become ready.
        replicas = [replica(r.name, "ready", r.digest) for r in kept]
        replicas += [replica(f"s{round_}-{i}", "starting") for i in range(start)]
    raise AssertionError("the rollout never ended")
