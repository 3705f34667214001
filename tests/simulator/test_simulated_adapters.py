"""Adapters on simulated pods: slots, loads, and the effect of load costs on users."""

from __future__ import annotations

import statistics

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_simulator.adapters import AdapterBay, AdapterSettings
from pagemill_simulator.conversations import Conversation, among_adapters, long_and_short
from pagemill_simulator.events import Events
from pagemill_simulator.fleet.routing_report import RoutingReport, report_routing
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.policy import ReplicaBounds

SEEDS = (101, 102, 103)
ENGINE = EngineConfig(
    model="sim",
    num_kv_blocks=2500,
    max_model_len=16384,
    max_num_seqs=48,
    max_num_waiting=100_000,
    vocab_size=32000,
    step_time=StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0], decode_context_ms=1e-5),
)


class World:
    """The adapters of a pod, with requests that run until the test ends them."""

    def __init__(self, num_slots: int) -> None:
        self.events = Events()
        self.started: list[str] = []
        self.bay = AdapterBay(
            AdapterSettings(num_slots, 0.2),
            self.events,
            start=lambda request: self.started.append(request.request_id),
            changed=lambda: None,
        )

    def enter(self, *names: str) -> None:
        """Add requests by name: `a1` is request 1 for the adapter a."""
        for name in names:
            sampling = SamplingParams(max_tokens=1)
            self.bay.enter(
                GenerateRequest(
                    request_id=name, model="m", prompt_token_ids=[1], sampling=sampling, adapter_digest=name[0]
                )
            )

    def reported(self) -> tuple[list[str], list[str]]:
        reported = self.bay.slots()
        return reported.resident, reported.loading


def test_loads_are_sequential_and_a_request_for_a_loaded_adapter_waits_for_none() -> None:
    world = World(num_slots=2)
    world.enter("a1", "b1", "a2")
    assert (world.started, world.reported()) == ([], ([], ["a", "b"]))
    world.events.step()
    assert (world.started, world.events.now_s) == (["a1", "a2"], pytest.approx(0.2))
    world.enter("a3")
    assert world.started[-1] == "a3"
    world.events.step()
    assert (world.started[-1], world.reported(), world.bay.num_loads) == ("b1", (["a", "b"], []), 2)
    assert world.events.now_s == pytest.approx(0.4)


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    world = World(num_slots=2)
    world.enter("a1", "b1")
    world.events.step()
    world.events.step()
    world.enter("a2")
    for name in ("a1", "a2", "b1"):
        world.bay.ended(name)
    world.enter("c1")
    assert world.reported() == (["a"], ["c"])


def test_without_an_idle_adapter_one_is_drained_and_new_requests_for_it_wait_for_its_reload() -> None:
    world = World(num_slots=1)
    world.enter("a1")
    world.events.step()
    world.enter("b1", "a2")
    assert world.reported() == ([], ["b", "a"])
    world.bay.ended("a1")
    for name in ("b1", "a2"):
        world.events.step()
        assert world.started[-1] == name
        world.bay.ended(name)
    assert world.bay.num_loads == 3


def test_an_adapter_that_is_no_longer_evicted_serves_its_waiting_requests() -> None:
    world = World(num_slots=2)
    world.enter("a1", "b1")
    world.events.step()
    world.events.step()
    world.enter("c1", "a2")
    assert world.reported() == (["b"], ["c", "a"])
    world.bay.ended("b1")
    assert (world.started[-1], world.reported()) == ("a2", (["a"], ["c"]))


def test_a_pod_without_a_reported_load_time_reports_everything_else() -> None:
    bay = AdapterBay(AdapterSettings(3, 0.2, False), Events(), start=lambda _: None, changed=lambda: None)
    assert bay.slots() == AdapterSlots(num_slots=3, num_kept=3)


def served(
    seed: int, policy: str, *, num_adapters: int = 8, num_slots: int = 2, reports: bool = True
) -> tuple[list[Conversation], RoutingReport]:
    traffic = among_adapters(long_and_short(seed)[:120], num_adapters, seed)
    adapters = AdapterSettings(num_slots=num_slots, load_s=0.2, reports_load_ms=reports)
    bounds = ReplicaBounds(4, 4)
    settings = FleetSettings(engine=ENGINE, bounds=bounds, routing_policy=policy, seed=seed, adapters=adapters)
    return traffic, report_routing(traffic, settings)


@pytest.mark.slow
def test_with_load_costs_there_are_fewer_loads_and_a_lower_ttft() -> None:
    """A few seeds of one mix; `python bench/adapters.py` runs more of both."""
    ratios = []
    for seed in SEEDS:
        traffic, with_term = served(seed, "Cost")
        _, without = served(seed, "Cost", reports=False)
        _, least = served(seed, "LeastRequest")
        assert len(with_term.ttft_ms) == len(without.ttft_ms) == len(least.ttft_ms) == len(traffic)
        assert with_term.num_adapter_loads < without.num_adapter_loads
        assert with_term.mean_ttft_ms < without.mean_ttft_ms
        ratios.append(with_term.mean_ttft_ms / least.mean_ttft_ms)
    assert statistics.mean(ratios) <= 1.05, ratios


def test_adapters_that_all_fit_are_loaded_at_most_once_per_pod() -> None:
    _, report = served(SEEDS[0], "Cost", num_adapters=3, num_slots=3)
    assert 3 <= report.num_adapter_loads <= 12
