"""Sleeping engines get no requests and are no capacity, and waiting requests report that an engine is needed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hand_clock import Clock
from waiting import WAIT_LIMIT_S

from pagemill_gateway.metrics.control_process import ControlProcessMetrics
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.load import DeploymentLoad, EngineStart, PodCounts
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import DEFAULT_TICKET, Assignment, RoutingRequest
from pagemill_routing.config import RoutingConfig

NOTHING = frozenset[str]()


class Front:
    """A brain and the state streams of its engines."""

    def __init__(self, *names: str, wakes: bool = True) -> None:
        self.brain = LocalBrain(RoutingConfig(), clock=Clock(), rng=random.Random(1))
        endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in names]
        self.brain.observer.apply_catalog(
            Catalog(models=[CatalogModel(deployment="m", name="m", endpoints=endpoints, wakes=wakes)])
        )
        self._sequence = dict.fromkeys(names, 0)
        for name in names:
            self.says(name)

    def says(self, name: str, *, running: int = 0, **fields: Any) -> None:
        self._sequence[name] += 1
        load = EngineLoad(num_kv_bytes_total=100, num_requests_running=running)
        frame = StateFrame(
            sequence=self._sequence[name],
            snapshot=self._sequence[name] == 1,
            max_model_len=100,
            digests=Digests(tokenizer_bundle="t"),
            load=load,
            **fields,
        )
        self.brain.observer.observe(name, frame)

    def ask(self) -> asyncio.Task[Assignment]:
        async def choose() -> Assignment:
            return await self.brain.choose(
                await self.brain.find("m"), NOTHING, RoutingRequest(1), ticket=DEFAULT_TICKET
            )

        return asyncio.ensure_future(choose())

    async def served(self) -> str:
        """Place a request, finish it, and return its endpoint."""
        choice = await asyncio.wait_for(self.ask(), WAIT_LIMIT_S)
        self.brain.finished(choice)
        return choice.endpoint_id

    @property
    def load(self) -> DeploymentLoad:
        (load,) = self.brain.reader.load()
        return load


async def test_a_sleeping_engine_gets_no_requests() -> None:
    front = Front("a", "b")
    front.says("a", sleeping=True)
    assert {await front.served() for _ in range(20)} == {"b"}
    front.says("a", num_wakes=1)
    assert {await front.served() for _ in range(20)} == {"a", "b"}


async def test_a_request_that_waits_for_sleeping_engines_requires_one_and_is_placed_by_its_first_report() -> None:
    front = Front("a")
    front.says("a", sleeping=True)
    assert not front.load.queue.needs_engine
    waiting = front.ask()
    await asyncio.sleep(0)
    assert front.load.queue.needs_engine
    front.says("a")
    assert (await asyncio.wait_for(waiting, WAIT_LIMIT_S)).endpoint_id == "a"


def test_without_an_operator_that_wakes_engines_the_refusal_says_that_they_sleep() -> None:
    front = Front("a", wakes=False)
    front.says("a", sleeping=True)
    with pytest.raises(PagemillError, match=r"1 engine\(s\) sleeping"):
        front.brain.resolve("m")


def test_a_sleeping_engine_is_neither_capacity_nor_loading() -> None:
    front = Front("a", "b", "c")
    front.says("b", sleeping=True)
    assert front.load.pods == PodCounts(ready=2, asleep=1)
    assert front.load.asleep == ["b"]
    assert (front.load.engines.num_reporting, front.load.engines.num_kv_bytes_total) == (2, 200)
    front.says("a", sleeping=True)
    front.says("c", sleeping=True)
    assert (front.load.engines.truth, front.load.engines.num_reporting) == ("value", 0), (
        "it is known that no request runs"
    )


def test_requests_that_still_run_before_the_sleep_are_load() -> None:
    front = Front("a", "b")
    front.says("b", sleeping=True, running=3)
    assert front.load.engines.num_requests_running == 3
    assert front.load.asleep == ["b"]


async def test_an_engine_that_declined_before_its_sleep_is_used_again_after_it() -> None:
    front = Front("a")
    choice = await front.ask()
    front.says("a", sleeping=True)
    front.brain.failed(choice, "declined")
    assert front.load.pods == PodCounts(asleep=1), "the engine does not stop"
    front.says("a")
    assert (await asyncio.wait_for(front.ask(), WAIT_LIMIT_S)).endpoint_id == "a"


@pytest.mark.parametrize("comes_late", [False, True])
async def test_an_engine_that_slept_between_two_reports_is_used_again(comes_late: bool) -> None:
    front = Front("a")
    choice = await front.ask()
    if comes_late:
        front.says("a", num_wakes=1)
    front.brain.failed(choice, "declined")
    if not comes_late:
        front.says("a")
        assert not front.load.pods.ready
        front.says("a", num_wakes=1)
    assert (await asyncio.wait_for(front.ask(), WAIT_LIMIT_S)).endpoint_id == "a"


async def test_a_late_refusal_from_before_the_sleep_does_not_affect_an_awake_engine() -> None:
    front = Front("a")
    choice = await front.ask()
    front.says("a", sleeping=True)
    front.says("a")
    front.brain.failed(choice, "declined")
    assert (await asyncio.wait_for(front.ask(), WAIT_LIMIT_S)).endpoint_id == "a"


def test_the_number_of_wakes_is_reported_with_the_start_times() -> None:
    front = Front("a")
    front.says("a", start_s={"load": 2.0, "wake": 0.1}, num_wakes=3)
    assert front.load.starts == [EngineStart("a", {"load": 2.0, "wake": 0.1}, 3)]


def test_metrics_have_a_phase_for_sleeping_engines() -> None:
    front = Front("a", "b")
    front.says("a", sleeping=True)
    text = ControlProcessMetrics().scrape(front.brain.reader, [], ready=True, current=True, accept="").body.decode()
    lines = {line for line in text.splitlines() if line.startswith("pagemill_gateway_endpoints{")}
    assert any('phase="sleeping"' in line and line.endswith(" 1.0") for line in lines)
    assert any('phase="starting"' in line and line.endswith(" 0.0") for line in lines)
