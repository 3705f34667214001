"""NVIDIA Dynamo's planner, load-based scaling of aggregated engines: latencies estimated from each engine's own steps.

Source: https://github.com/ai-dynamo/dynamo, docs/design-docs/planner-design.md (320e674: load-based scaling) and
docs/components/planner/planner-guide.md (092029e: defaults), with the check of the remaining capacity after a removal
(pull request 9294). Every five seconds: one replica more if the estimated time to first token, or between tokens, of
ALL engines exceeds its target; one fewer if N/(N-1) of each engine's load keeps its queueing delay under 80 % of what
the target leaves, keeps the time between tokens under 80 % of its target, and fits the cache. It changes nothing while
a replica starts or an engine has no metrics. The minimum is one replica.

Dynamo fits step times to what engines report; here the fit that Pagemill's engines publish is used instead.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import msgspec

from pagemill_operator.autoscaler.decision import Decision, decided
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.report.load import EngineReport, EnginesLoad
from pagemill_protocol.report.shape import shape_of
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_simulator.parameters import Parameters, Positive, Share
from pagemill_simulator.scaling.rival import engines, is_due, num_waiting, within

ROUNDS = 8


class Dynamo(Parameters, frozen=True, kw_only=True):
    """Scales by the estimated latencies of all engines, one replica at a time."""

    name: ClassVar[str] = "dynamo"
    ttft_ms: Positive = 500.0
    """Target of the time to first token."""
    itl_ms: Positive = 50.0
    """Target of the time between tokens."""
    sensitivity: Share = 0.8
    """`load_scaling_down_sensitivity`: the share of the targets that must suffice after a removal."""
    interval_s: Positive = 5.0
    """`load_adjustment_interval`: seconds between decisions."""

    def policy(self) -> DynamoLoad:
        return DynamoLoad(self)


class Work(NamedTuple):
    """The work of one engine."""

    queued_tokens: float
    """Tokens of waiting prompts."""
    context_tokens: float
    """Tokens read by running requests."""
    num_running: int

    def times(self, factor: float) -> Work:
        return self._replace(queued_tokens=self.queued_tokens * factor, context_tokens=self.context_tokens * factor)


class Estimator:
    """Estimates the latencies of one kind of engine."""

    def __init__(
        self, step_time: StepTimeModel, *, prompt_tokens: float, step_tokens: int, prompt_tokens_per_s: float
    ) -> None:
        """`prompt_tokens_per_s` is the rate of prompt tokens that one engine gets."""
        self._step_time = step_time
        self._prompt_tokens = prompt_tokens
        self._step_tokens = step_tokens
        self._rate = prompt_tokens_per_s

    def ttft_ms(self, work: Work) -> float:
        """Return the time for all waiting prompts and the next request, in chunks beside the answers."""
        room = max(1.0, self._step_tokens - work.num_running)
        full, rest = divmod(work.queued_tokens + self._prompt_tokens, room)
        return full * self._step_ms(room, work) + (self._step_ms(rest, work) if rest else 0.0)

    def itl_ms(self, work: Work) -> float:
        """Return the time of a step with one more answer, and with the prompts that arrive on average during one."""
        one_more = work.context_tokens / work.num_running if work.num_running else self._prompt_tokens
        more = work._replace(context_tokens=work.context_tokens + one_more, num_running=work.num_running + 1)
        step_ms = self._step_ms(0.0, more)
        for _ in range(ROUNDS):
            step_ms = self._step_ms(min(self._step_tokens, self._rate * step_ms / 1000), more)
        return step_ms

    def _step_ms(self, prompt_tokens: float, work: Work) -> float:
        products = round(prompt_tokens * self._prompt_tokens / 2)
        return self._step_time.predict_ms(
            max(1, round(prompt_tokens) + work.num_running), round(work.context_tokens), products
        )


class DynamoMemory(msgspec.Struct, frozen=True):
    decided_at_s: float | None = None


class DynamoLoad:
    name: ClassVar[str] = Dynamo.name
    memory_type: ClassVar[type[DynamoMemory]] = DynamoMemory
    sees_replicas: ClassVar[bool] = True
    reads_slo: ClassVar[bool] = False
    wakes_at_once: ClassVar[bool] = False

    def __init__(self, parameters: Dynamo | None = None) -> None:
        self._parameters = parameters or Dynamo()
        self.interval_s = self._parameters.interval_s

    def decide(
        self, settings: ScalingSettings, signals: Signals, memory: DynamoMemory
    ) -> tuple[Decision, DynamoMemory]:
        before = signals.fleet.wanted
        wanted = within(settings, before, least=1)
        if not is_due(signals.at_s, memory.decided_at_s, self.interval_s):
            return decided(before, wanted, "between two decisions"), memory
        memory = DynamoMemory(signals.at_s)
        reporting = engines(signals)
        if not reporting or len(reporting) != before:
            return decided(before, wanted, "a replica starts, or an engine has no metrics"), memory
        prompt_tokens = _prompt_tokens(signals)
        estimator = _estimator(signals, prompt_tokens, len(reporting))
        if estimator is None:
            return decided(before, wanted, "step times, lengths or sizes are not known"), memory
        capacity = _cache_tokens(signals.engines)
        works = [_work(engine, signals, capacity, prompt_tokens) for engine in reporting]
        replicas = within(settings, len(works) + step(works, estimator, capacity, self._parameters), least=1)
        return decided(before, replicas, f"estimated latencies of {len(works)} engines"), memory


def step(works: list[Work], estimator: Estimator, capacity: float, parameters: Dynamo) -> int:
    """Return 1 for one replica more, -1 for one fewer, else 0. `capacity` is the tokens that an engine's cache
    holds.
    """
    if all(estimator.ttft_ms(work) > parameters.ttft_ms for work in works):
        return 1
    if all(estimator.itl_ms(work) > parameters.itl_ms for work in works):
        return 1
    if len(works) < 2:
        return 0
    factor = len(works) / (len(works) - 1)
    return -1 if all(_bears(work.times(factor), estimator, capacity, parameters) for work in works) else 0


def _bears(work: Work, estimator: Estimator, capacity: float, parameters: Dynamo) -> bool:
    """Whether an engine can take this load after one of the others is removed."""
    held = work.context_tokens + work.queued_tokens
    if held >= capacity:
        return False
    own_ms = estimator.ttft_ms(work._replace(queued_tokens=0.0))
    left_ms = (parameters.ttft_ms - own_ms) * parameters.sensitivity
    if left_ms <= 0 or estimator.ttft_ms(work) - own_ms >= left_ms:
        return False
    all_running = work._replace(context_tokens=held)
    return estimator.itl_ms(all_running) < parameters.itl_ms * parameters.sensitivity


def _work(engine: EngineReport, signals: Signals, capacity: float, prompt_tokens: float) -> Work:
    load = engine.load
    return Work(num_waiting(engine, signals) * prompt_tokens, load.kv_cache_usage * capacity, load.num_requests_running)


def _estimator(signals: Signals, prompt_tokens: float, num_engines: int) -> Estimator | None:
    """Return an estimator, or None if the engines have not reported enough yet."""
    reported = signals.engines
    model = _model(reported.step_time)
    if model is None or reported.max_step_tokens <= 0 or not _cache_tokens(reported) or not prompt_tokens:
        return None
    return Estimator(
        model,
        prompt_tokens=prompt_tokens,
        step_tokens=reported.max_step_tokens,
        prompt_tokens_per_s=_finite(signals.arrivals.tokens_per_s) / num_engines,
    )


def _model(params: StepTimeParams) -> StepTimeModel | None:
    try:
        model = StepTimeModel.from_params(params)
    except ValueError:
        return None
    return model if model.known else None


def _prompt_tokens(signals: Signals) -> float:
    """Return the mean uncached tokens of the latest prompts, or else of recent arrivals; 0 if unknown."""
    mean = signals.lengths.computed.mean()
    if mean is not None and math.isfinite(mean):
        return mean
    arrivals = signals.arrivals
    return _finite(arrivals.tokens_per_s / arrivals.requests_per_s) if arrivals.requests_per_s > 0 else 0.0


def _cache_tokens(reported: EnginesLoad) -> float:
    """Return the tokens that one engine's cache holds; 0 if not reported."""
    shape = shape_of(reported)
    return shape.num_tokens if shape is not None else 0


def _finite(value: float) -> float:
    return value if 0 <= value < math.inf else 0.0
