"""Simulated engines with stages decide as real ones do, and are as fast as the times that real ones learn say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from ranked_engine import SETTINGS, Ranks, rank_loader, saved

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.config import SpeculationConfig
from pagemill_kernels.cpu import library
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_simulator.clock import VirtualClock
from pagemill_simulator.engine import EngineRun, EngineSimulation
from pagemill_simulator.speculation import simulated_core
from pagemill_simulator.workloads.request import SimRequest

NUM_LAYERS = 3
PROMPTS = [4, 30, 90, 1, 17, 64, 33, 5, 120, 8, 2, 50]
"""Lengths; a step has 64 tokens, so some need two."""
STEP_TIME = StepTimeParams(
    knots_tokens=[1, 8, 64], knot_ms=[4.0, 6.0, 20.0], decode_context_ms=1e-4, chunk_context_ms=1e-6
)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with rank_loader() as load:
        yield load


class Decision(NamedTuple):
    num_in_flight: int
    """Steps that were launched and not read when this one was planned."""
    num_tokens: dict[str, int]
    samples: set[str]


def decisions(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """Run requests that arrive at fixed steps, whatever the time, and return what every step has."""
    found: list[Decision] = []
    schedule = core.scheduler.schedule

    def noted() -> Any:
        plan = schedule()
        found.append(Decision(len(core._in_flight), dict(plan.num_scheduled_tokens), set(plan.samples)))
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", noted)
    waiting = [(0 if number < 5 else 3 * number, number, length) for number, length in enumerate(PROMPTS)]
    num_steps = 0
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= num_steps:
            _, number, length = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=5 + number, ignore_eos=True)
            prompt = [number] + [7] * (length - 1)
            core.add(GenerateRequest(request_id=f"r{number}", model="m", prompt_token_ids=prompt, sampling=params))
        core.step()
        num_steps += 1
    core.check_integrity()
    return found


@pytest.mark.skipif(library.load() is None, reason="stages compute with native kernels")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_simulated_engine_decides_every_step_as_the_real_one(
    num_stages: int, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times have no part in it: a step is planned when another one was read."""
    runner = ranks(saved("Llama", tmp_path, num_hidden_layers=NUM_LAYERS), num_stages, num_stages=num_stages)
    settings = {**SETTINGS, "enable_prefix_caching": False, "pipeline_parallel_size": num_stages}
    settings["speculative"] = SpeculationConfig(method="off")
    config = EngineConfig(model="m", **settings)
    real = decisions(EngineCore(config, runner), monkeypatch)
    clock = VirtualClock()
    simulated = msgspec.structs.replace(config, vocab_size=131, overlap=None)
    assert decisions(simulated_core(simulated, clock.now, clock.advance), monkeypatch) == real
    assert max(decision.num_in_flight for decision in real if decision.num_tokens) >= num_stages - 1


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 32])
def test_times_that_an_engine_with_stages_learns_are_those_of_its_steps(num_requests: int, num_stages: int) -> None:
    """An engine measures from one read to the next. Simulated with what it has learned, it takes as long as it did."""
    config = EngineConfig(
        model="m", num_kv_blocks=2000, max_model_len=1024, pipeline_parallel_size=num_stages,
        enable_prefix_caching=False, step_time=STEP_TIME,
    )  # fmt: skip
    trace = [SimRequest(0.0, 12, 60) for _ in range(num_requests)]
    clock = VirtualClock()
    core = simulated_core(config, clock.now, clock.advance)
    took = EngineRun(trace, core, clock).run()
    learned = core.step_time.params()
    assert learned.stages == num_stages
    again = EngineSimulation(trace, config, learned).run()
    assert again.num_steps == took.num_steps
    assert again.duration_s == pytest.approx(took.duration_s, rel=0.06)
    assert again.tpot_ms.p50 == pytest.approx(took.tpot_ms.p50, rel=0.06)
