"""Compares the step-time model with a real engine whose clock is its processor time: steps, and latencies of traces.

One engine of the embedded model in this process, with one thread; nothing is served. Its clock is the processor time of
the process, and idle time is skipped, so that other work on the machine does not stretch its steps. It takes a
calibration trace, as in `simulator_truth`, and what it has learned by then is compared with other traces at several
loads: step by step, and by simulating the same requests. `--steps` keeps every step for other models to be fitted to.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from report import emit, markdown_table, progress
from simulator_truth import CALIBRATION, SIGMA, TRACES
from truth.compare import Latencies
from workload import MODEL

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import Calibration, self_test
from pagemill_execution.runners.base import Runner
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.step import StepPlan
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_simulator.engine import EngineRun, EngineSimulation, Latency
from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.shapes import Ramp, Steady

LOADS = {"low": 0.2, "middle": 0.4, "high": 0.7, "full": 0.95}
"""Shares of the engine's capacity in requests per second."""
CROWD = 48
"""Simultaneous requests: the most sequences in a step."""
COLUMNS = ["load", "requests", "figure", "engine", "simulated", "error %"]


class Step(msgspec.Struct, frozen=True):
    load: str
    num_sequences: int
    num_tokens: int
    decode_context_tokens: int
    chunk_context_products: int
    ms: float

    def predicted_ms(self, model: StepTimeModel) -> float:
        return model.predict_ms(self.num_tokens, self.decode_context_tokens, self.chunk_context_products)


class ProcessorClock:
    """A clock of the seconds that this process has computed or skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return self._skipped_s + time.process_time()

    def advance_to(self, instant_s: float) -> None:
        self._skipped_s += max(0.0, instant_s - self.now())


class PlanNoting:
    """A runner that keeps the latest plan."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plan: StepPlan | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        self.plan = plan
        return self._runner.launch(plan)


class RealEngine(EngineRun):
    """An engine that computes its steps."""

    def __init__(self, load: str, trace: Sequence[SimRequest], core: EngineCore, clock: ProcessorClock) -> None:
        super().__init__(trace, core, clock)
        self._load = load
        self.steps: list[Step] = []

    def _step(self) -> None:
        runner: Any = self.core.runner
        runner.plan = None
        super()._step()
        plan: StepPlan | None = runner.plan
        if plan is not None:
            contexts = plan.decode_context_tokens, plan.chunk_context_products
            size = len(plan.num_scheduled_tokens), plan.num_tokens
            self.steps.append(Step(self._load, *size, *contexts, self.core.load().step_ms))


def main() -> None:
    args = _arguments()
    clock = ProcessorClock()
    core = engine(clock)
    swept = core.step_time.params()
    steps, rows, result = [], [], {}
    requests = calibration(args.rate, args.seconds)
    learning = RealEngine("calibration", requests, core, clock)
    learning.run()
    learned = core.step_time.params()
    progress(f"after the sweep {swept}, after {len(requests)} requests {learned}")
    steps += learning.steps
    for load, trace in traces(args.rate, args.seconds).items():
        if load not in args.loads:
            continue
        real = RealEngine(load, trace, core, clock)
        real.run()
        steps += real.steps
        figures = compared(real, trace, learned, core) | of_steps(real.steps, swept, learned)
        result[load] = figures
        rows += [[load, len(trace), name, *_cells(*pair)] for name, pair in figures.items()]
        progress(f"{load}: {json.dumps(figures)}")
    if args.steps is not None:
        args.steps.write_bytes(msgspec.json.encode(steps))
    if args.markdown:
        print(markdown_table(COLUMNS, rows))
    emit("step_times", COLUMNS, rows, {**result, "learned": msgspec.to_builtins(learned)})


def engine(clock: ProcessorClock) -> EngineCore:
    """Return a ready engine. Its prefix cache is off, because traces share prompts."""
    config = EngineConfig(
        model=MODEL, max_model_len=2048, num_threads=1, overlap=False, seed=0, enable_prefix_caching=False
    )
    runner: Any = PlanNoting(create_runner(config, lambda phase, detail: None))
    core = EngineCore(config, runner, clock=clock.now)
    self_test(core)
    calibration = Calibration(core)
    calibration.begin()
    while calibration.measure_next():  # as an engine does until its first request
        pass
    return core


def calibration(rate: float, seconds: float) -> list[SimRequest]:
    """Return a calibration trace that rises from 10 % to 80 % of the capacity and falls again."""
    lengths: dict[str, Any] = {**CALIBRATION, "prompt_sigma": SIGMA, "output_sigma": SIGMA}
    ends: dict[str, Any] = {"from_rate": 0.1 * rate, "to_rate": 0.8 * rate}
    ramp = Ramp(before_s=0.0, over_s=seconds / 2, after_s=0.0, **ends, **lengths)
    up, down = ramp.requests(101), ramp.requests(102)
    return up + [each._replace(arrival_s=seconds - each.arrival_s) for each in reversed(down)]


def traces(rate: float, seconds: float) -> dict[str, list[SimRequest]]:
    lengths: dict[str, Any] = {**TRACES, "prompt_sigma": SIGMA, "output_sigma": SIGMA}
    found = {
        load: list(Steady(rate=share * rate, duration_s=seconds, **lengths).requests(1))
        for load, share in LOADS.items()
    }
    crowd = Steady(rate=CROWD, duration_s=2.0, **lengths).requests(0)[:CROWD]
    return {**found, "crowd": [each._replace(arrival_s=0.0) for each in crowd]}


def compared(
    real: RealEngine, trace: Sequence[SimRequest], learned: StepTimeParams, core: EngineCore
) -> dict[str, tuple[float, float]]:
    """Return each percentile on the engine and in the simulation."""
    limits, info = core.scheduler.limits, core.runner.info
    config = EngineConfig(
        model="measured",
        num_kv_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=False,
        overlap=False,
    )
    simulated = EngineSimulation(trace, config, learned)
    simulated.run()
    sides = [_quantiles(each.latencies) for each in (real, simulated)]
    return {name: (sides[0][name], sides[1][name]) for name in sides[0]}


def of_steps(steps: Sequence[Step], swept: StepTimeParams, learned: StepTimeParams) -> dict[str, tuple[float, float]]:
    """Return the errors of all steps of a load: of their total time, and the median of the relative errors."""
    found = {}
    for name, params in (("after the sweep", swept), ("learned", learned)):
        model = StepTimeModel.from_params(params)
        predicted = [each.predicted_ms(model) for each in steps]
        taken_ms = sum(each.ms for each in steps)
        found[f"steps in sum, {name}"] = (taken_ms, sum(predicted))
        error = median(abs(ms / each.ms - 1) for ms, each in zip(predicted, steps, strict=True))
        found[f"median step error, {name}"] = (1.0, 1.0 + error)
    return found


def _quantiles(latencies: Sequence[Latency]) -> dict[str, float]:
    tpots = [each.tpot_ms for each in latencies if each.tpot_ms is not None]
    return Latencies([each.ttft_ms for each in latencies], tpots).quantiles()


def _cells(measured: float, simulated: float) -> list[str]:
    return [f"{measured:.1f}", f"{simulated:.1f}", f"{100 * (simulated / measured - 1):+.0f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1.7, help="requests per second that the engine sustains")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each trace in seconds")
    parser.add_argument("--loads", nargs="+", default=[*LOADS, "crowd"], choices=[*LOADS, "crowd"])
    parser.add_argument("--steps", type=Path, help="JSON file to which every step is written")
    parser.add_argument("--markdown", action="store_true", help="also print the table for the documentation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
