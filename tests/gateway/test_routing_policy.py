"""The policy of least requests, alone and in the brain: balance, fairness, and endpoints that are never chosen."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import RoutingRequest
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.least_request import LeastRequest
from pagemill_routing.policies.policy import Candidate, RequestView

NOTHING = frozenset[str]()


def make_brain(terminating: list[bool], draining: list[bool]) -> LocalBrain:
    endpoints = [
        Endpoint(id=f"e{index}", data_url=f"http://e{index}:1", control_url=f"http://e{index}:2", terminating=flag)
        for index, flag in enumerate(terminating)
    ]
    brain = LocalBrain(RoutingConfig(), clock=lambda: 0.0)
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    for endpoint, flag in zip(endpoints, draining, strict=True):
        brain.observer.observe(endpoint.id, StateFrame(sequence=1, snapshot=True, max_model_len=100, draining=flag))
    return brain


candidates = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000)), min_size=1, max_size=20
).map(lambda rows: [Candidate(f"e{index}", *row) for index, row in enumerate(rows)])


@given(candidates)
def test_the_least_busy_endpoint_wins_and_ties_go_to_the_one_chosen_longest_ago(choices: list[Candidate]) -> None:
    chosen = LeastRequest().choose(RequestView(), choices).chosen
    least = min(each.in_flight + each.external for each in choices)
    tied = [each for each in choices if each.in_flight + each.external == least]
    assert chosen in tied
    assert chosen.last_chosen == min(each.last_chosen for each in tied)


@settings(deadline=None)
@given(
    flags=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 1000)), max_size=120),
)
def test_running_requests_stay_balanced_and_a_draining_endpoint_is_the_last_resort(
    flags: list[tuple[bool, bool]], steps: list[int | None]
) -> None:
    """`None` places a request; a number finishes a running one. Terminating endpoints get no requests."""
    brain = make_brain([flag for flag, _ in flags], [flag for _, flag in flags])
    staying = {f"e{index}" for index, (terminating, draining) in enumerate(flags) if not terminating and not draining}
    staying = staying or {f"e{index}" for index, (terminating, _) in enumerate(flags) if not terminating}
    if not staying:
        with pytest.raises(PagemillError) as refusal:
            brain.resolve("m")
        assert refusal.value.status == 503
        return
    target = brain.resolve("m")
    under_way = []
    for step in steps:
        records = brain.registry.endpoints
        if step is None:
            before = {name: records[name].in_flight for name in staying}
            choice = asyncio.run(brain.choose(target, NOTHING, RoutingRequest(10)))
            assert choice.endpoint_id in staying
            assert before[choice.endpoint_id] == min(before.values())
            under_way.append(choice)
        elif under_way:
            brain.finished(under_way.pop(step % len(under_way)))
        assert sum(record.in_flight for record in records.values()) == len(under_way)
    for choice in under_way:
        brain.finished(choice)
        brain.finished(choice)
    assert all(record.in_flight == 0 for record in brain.registry.endpoints.values())


@given(num_endpoints=st.integers(1, 8), num_rounds=st.integers(1, 5))
def test_no_endpoint_starves(num_endpoints: int, num_rounds: int) -> None:
    brain = make_brain([False] * num_endpoints, [False] * num_endpoints)
    target = brain.resolve("m")
    chosen = []
    for _ in range(num_endpoints * num_rounds):
        choice = asyncio.run(brain.choose(target, NOTHING, RoutingRequest(10)))
        chosen.append(choice.endpoint_id)
        brain.finished(choice)
    assert all(chosen.count(f"e{index}") == num_rounds for index in range(num_endpoints))


def test_concurrent_decisions_count_before_engines_report_them() -> None:
    brain = make_brain([False] * 4, [False] * 4)
    target = brain.resolve("m")

    async def arrive_together() -> list[str]:
        choices = await asyncio.gather(*(brain.choose(target, NOTHING, RoutingRequest(10)) for _ in range(100)))
        return [choice.endpoint_id for choice in choices]

    chosen = asyncio.run(arrive_together())
    assert {chosen.count(f"e{index}") for index in range(4)} == {25}


def test_decisions_import_neither_torch_nor_http() -> None:
    code = (
        "import importlib, pkgutil, sys, pagemill_routing\n"
        "found = pkgutil.walk_packages(pagemill_routing.__path__, 'pagemill_routing.')\n"
        "names = [importlib.import_module(m.name).__name__ for m in found]\n"
        "assert len(names) >= 40, names\n"
        "bad = [m for m in ('torch', 'aiohttp', 'fastapi', 'starlette', 'transformers') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
