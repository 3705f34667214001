"""The deletion costs on pods, by which Kubernetes removes the emptiest replicas, and the number of their writes."""

from __future__ import annotations

from typing import Any

import pytest
from engine_reports import reported
from hypothesis import given
from hypothesis import strategies as st

from pagemill_operator.backends.kubernetes.deletion_cost import COST_ANNOTATION, costs_to_write
from pagemill_operator.load.store import emptiest_first, weight
from pagemill_protocol.report.load import EngineReport

Manifest = dict[str, Any]
TEMPLATE = "t1"


def pod(name: str, *, ready: bool = True, cost: str | None = None, template: str = TEMPLATE, **more: Any) -> Manifest:
    annotations = {"pagemill.dev/template": template} | ({COST_ANNOTATION: cost} if cost is not None else {})
    metadata = {
        "name": name,
        "uid": name,
        "labels": {"app.kubernetes.io/component": "engine"},
        "annotations": annotations,
        "creationTimestamp": f"2026-01-01T00:00:{ord(name[0]) % 60:02}Z",
        **more,
    }
    return {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}


def held(**blocks: int) -> dict[str, EngineReport]:
    return {name: reported(name, count, 1) for name, count in blocks.items()}


def written(pods: list[Manifest], known: dict[str, EngineReport], replicas: int) -> dict[str, str | None]:
    return {each["metadata"]["name"]: value for each, _, value in costs_to_write(pods, known, replicas, TEMPLATE)}


def test_a_sleeping_pod_is_removed_before_a_starting_one() -> None:
    pods = [pod("a"), pod("b", ready=False), pod("c", ready=False)]
    costs = costs_to_write(pods, held(a=1, b=0), 2, TEMPLATE, {"b"})
    assert [(cost.pod["metadata"]["name"], cost.value) for cost in costs] == [("b", "-1")]
    assert not list(costs_to_write(pods[:2], held(a=1, b=0), 1, TEMPLATE, {"b"})), (
        "Kubernetes chooses it without a deletion cost"
    )
    assert not list(costs_to_write(pods, held(a=1, b=0), 3, TEMPLATE, {"b"})), "no pod is removed"


THREE = [pod("a"), pod("b"), pod("c")]


@pytest.mark.parametrize(
    ("pods", "known", "replicas", "expected"),
    [
        (THREE, held(a=9, b=1, c=5), 2, {"b": "-1"}),
        (THREE, held(a=9, b=1, c=5), 1, {"b": "-1", "c": "-1"}),
        (THREE, held(a=5, b=5, c=5), 2, {"c": "-1"}),
        (THREE, held(a=9, b=9), 2, {"b": "-1"}),
        (THREE, {}, 1, {}),
        (THREE, held(a=1, b=2, c=3), 0, {}),
        (THREE, held(a=1, b=2, c=3), 3, {}),
        ([pod("a"), pod("b"), pod("c", ready=False)], held(a=1, b=2), 2, {}),
        ([pod("a"), pod("b"), pod("c", ready=False)], held(a=1, b=2), 1, {"a": "-1"}),
        ([pod("a", cost="-1"), pod("b"), pod("c")], held(a=9, b=1, c=5), 2, {"a": None, "b": "-1"}),
        ([pod("a", cost="-1"), pod("b"), pod("c")], held(a=1, b=2, c=5), 2, {}),
        ([pod("a"), pod("b", cost="100"), pod("c")], held(a=9, b=1, c=5), 2, {}),
        ([pod("a"), pod("b"), pod("c", template="old")], held(a=2, b=1, c=0), 1, {"b": "-1"}),
        ([pod("a"), pod("b"), pod("c", deletionTimestamp="2026-01-01T00:00:00Z")], held(a=2, b=1, c=0), 1, {"b": "-1"}),
    ],
    ids=[
        "the emptiest",
        "as many as go",
        "the youngest of equals",
        "what a silent engine holds is not known",
        "nothing known, nothing written",
        "all go",
        "no pod goes",
        "Kubernetes takes the unready",
        "the unready and one more",
        "an outdated note is taken back",
        "a note that is right already",
        "another owner's cost stands",
        "those of another template are replaced anyhow",
        "who is ending does not count",
    ],
)
def test_the_written_deletion_costs(
    pods: list[Manifest], known: dict[str, EngineReport], replicas: int, expected: dict[str, str | None]
) -> None:
    assert written(pods, known, replicas) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from([None, "-1"])), max_size=8), st.data())
def test_a_removed_pod_is_never_fuller_than_a_remaining_one(
    pods: list[tuple[int, int, str | None]], data: st.DataObject
) -> None:
    names = [chr(ord("a") + index) for index in range(len(pods))]
    known = {name: reported(name, blocks, requests) for name, (blocks, requests, _) in zip(names, pods, strict=True)}
    there = [pod(name, cost=cost) for name, (_, _, cost) in zip(names, pods, strict=True)]
    replicas = data.draw(st.integers(0, len(pods) + 1))
    for each, _, value in costs_to_write(there, known, replicas, TEMPLATE):
        each["metadata"]["annotations"][COST_ANNOTATION] = value
    if not 0 < replicas < len(pods):
        return
    going = {each["metadata"]["name"] for each in there if each["metadata"]["annotations"].get(COST_ANNOTATION)}
    assert len(going) == len(pods) - replicas
    heaviest = max(weight(known[name]) for name in going)
    assert all(weight(known[name]) >= heaviest for name in set(names) - going)
    for each in there:
        if each["metadata"]["annotations"].get(COST_ANNOTATION) is None:
            each["metadata"]["annotations"].pop(COST_ANNOTATION, None)
    assert written(there, known, replicas) == {}, "a correct cost must not be written again"


def test_pods_are_ranked_by_blocks_then_requests_and_equal_ones_keep_their_order() -> None:
    known = {
        "a": reported("a", 3, 1),
        "b": reported("b", 1, 9),
        "c": reported("c", 1, 2),
        "d": reported("d", 1, 2),
    }
    assert emptiest_first(["e", "d", "c", "b", "a"], str, known) == ["d", "c", "b", "a", "e"]
