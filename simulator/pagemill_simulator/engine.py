"""One engine in virtual time: the real scheduler and KV manager, a null runner, and the step-time model.

Everything but the forward pass is the production code, so it decides as the engine would. The same trace and
configuration give the same report, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.step_timer import StepTimer
from pagemill_execution.step import StepPlan
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_simulator.clock import VirtualClock
from pagemill_simulator.speculation import simulated_core
from pagemill_simulator.workloads.request import SimRequest


class Percentiles(msgspec.Struct, frozen=True):
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return nearest-rank percentiles; all zero without values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(*(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 90, 99, 100)))


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies as users see them, and the engine's work."""

    num_requests: int
    num_finished: int
    num_refused: int
    """Refused requests: too large for this configuration, or more than may wait."""
    refusals: dict[str, int]
    """Number of refusals by error code."""
    ttft_s: Percentiles
    """Time from arrival to the first token."""
    tpot_ms: Percentiles
    """Mean time between the tokens of a request."""
    e2e_s: Percentiles
    num_prompt_tokens: int
    """Tokens of finished requests."""
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    duration_s: float
    """Virtual time from the first arrival to the last token."""
    busy_share: float
    """Share of the duration in which a step was running."""
    kv_waste_mean: float
    """Mean over steps of allocated minus used slots, divided by allocated slots."""
    kv_waste_max: float


class Latency(NamedTuple):
    """The latency of one finished request."""

    ttft_ms: float
    tpot_ms: float | None
    """None: the answer had one token."""


@dataclass(slots=True)
class _RequestState:
    """The state of one request, in virtual seconds."""

    request: SimRequest
    first_token_s: float | None = None
    finished_s: float | None = None
    num_output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_ms(self) -> float:
        return (self.e2e_s - self.ttft_s) * 1000 / max(1, self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.request.arrival_s


class Clock(Protocol):
    def now(self) -> float:
        """Return the time in seconds."""

    def advance_to(self, instant_s: float) -> None:
        """Advance to the instant; nothing happens before."""


class EngineRun:
    """Runs one trace through one engine, beginning at the clock's present time."""

    def __init__(self, trace: Sequence[SimRequest], core: EngineCore, clock: Clock) -> None:
        """`core` must use `clock`."""
        self.core = core
        self.clock = clock
        came = sorted(trace, key=lambda request: request.arrival_s)
        self._trace = [each._replace(arrival_s=clock.now() + each.arrival_s) for each in came]
        self._requests: dict[str, _RequestState] = {}
        self._refusals: Counter[str] = Counter()
        self._wastes: list[float] = []
        self._busy_s = 0.0

    def run(self) -> SimulationReport:
        """Run to the last token of the last request. Raise `RuntimeError` if a request was lost or ended twice."""
        arrivals = iter(enumerate(self._trace))
        upcoming = next(arrivals, None)
        while upcoming is not None or self.core.has_work:
            if upcoming is not None and not self.core.has_work:
                self.clock.advance_to(upcoming[1].arrival_s)
            while upcoming is not None and upcoming[1].arrival_s <= self.clock.now():
                self._arrive(*upcoming)
                upcoming = next(arrivals, None)
            if self.core.has_work:
                self._step()
        self.core.check_integrity()
        return self._report()

    @property
    def latencies(self) -> list[Latency]:
        """Return the latencies of all finished requests, in the order of arrival."""
        return [
            Latency(state.ttft_s * 1000, state.tpot_ms if state.num_output_tokens > 1 else None)
            for state in self._requests.values()
            if state.finished_s is not None
        ]

    def _arrive(self, index: int, request: SimRequest) -> None:
        name = f"sim-{index}"
        vocab_size = self.core.runner.info.vocab_size
        # Two leading tokens number the request, so that no two prompts share a prefix by accident.
        prompt = [index // vocab_size % vocab_size, index % vocab_size] + [7] * request.num_prompt_tokens
        sampling = SamplingParams(max_tokens=max(1, request.num_output_tokens), ignore_eos=True)
        try:
            self.core.add(
                GenerateRequest(
                    request_id=name,
                    model="",
                    prompt_token_ids=prompt[: max(1, request.num_prompt_tokens)],
                    sampling=sampling,
                    priority=request.priority,
                )
            )
        except PagemillError as error:
            self._refusals[error.code or "refused"] += 1
            return
        self._requests[name] = _RequestState(request)

    def _step(self) -> None:
        started_s = self.clock.now()
        outputs = self.core.step()
        self._busy_s += self.clock.now() - started_s
        usage = self.core.scheduler.kv.slot_usage()
        if usage.allocated_slots:
            self._wastes.append(usage.waste)
        self._book(outputs)

    def _book(self, step: StepOutputs) -> None:
        now_s = self.clock.now()
        for output in step.outputs:
            state = self._requests[output.request_id]
            if state.finished_s is not None or output.error is not None:
                raise RuntimeError(f"{output.request_id} ended twice or failed: {output.error}")
            if output.token_ids and state.first_token_s is None:
                state.first_token_s = now_s
            state.num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                state.finished_s = now_s

    def _report(self) -> SimulationReport:
        requests = list(self._requests.values())
        if any(state.finished_s is None for state in requests):
            raise RuntimeError("a request was lost: it was accepted and never ended")
        first_s = self._trace[0].arrival_s if self._trace else 0.0
        return SimulationReport(
            num_requests=len(self._trace),
            num_finished=len(requests),
            num_refused=self._refusals.total(),
            refusals=dict(self._refusals),
            ttft_s=Percentiles.of([state.ttft_s for state in requests]),
            tpot_ms=Percentiles.of([state.tpot_ms for state in requests if state.num_output_tokens > 1]),
            e2e_s=Percentiles.of([state.e2e_s for state in requests]),
            num_prompt_tokens=sum(state.request.num_prompt_tokens for state in requests),
            num_output_tokens=sum(state.num_output_tokens for state in requests),
            num_steps=self.core.num_steps,
            num_preemptions=self.core.scheduler.num_preemptions,
            duration_s=self.clock.now() - first_s,
            busy_share=self._busy_s / (self.clock.now() - first_s) if self.clock.now() > first_s else 0.0,
            kv_waste_mean=sum(self._wastes) / len(self._wastes) if self._wastes else 0.0,
            kv_waste_max=max(self._wastes, default=0.0),
        )


class _KnownTimes(StepTimer):
    """Steps take what a model says: fitting another one to them would be a third of a simulation's time."""

    def observe(self, model: StepTimeModel, plan: StepPlan, ms: float, now_s: float) -> None:
        pass


class EngineSimulation(EngineRun):
    """An engine whose steps take the time that the step-time model predicts."""

    def __init__(self, trace: Sequence[SimRequest], config: EngineConfig, params: StepTimeParams | None = None) -> None:
        clock = VirtualClock()
        settings = msgspec.structs.replace(config, step_time=params or config.step_time)
        core = simulated_core(settings, clock.now, clock.advance)
        core.step_timer = _KnownTimes()
        super().__init__(trace, core, clock)


def simulate(
    trace: Sequence[SimRequest], config: EngineConfig, params: StepTimeParams | None = None
) -> SimulationReport:
    """Serve `trace` on one engine of `config` whose steps take what `params` predict (default: the null runner's
    own).
    """
    return EngineSimulation(trace, config, params).run()
