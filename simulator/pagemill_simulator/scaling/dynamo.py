"""NVIDIA Dynamo's planner, load-based scaling of aggregated engines: latencies estimated from each engine's own steps.

Source: https://github.com/ai-dynamo/dynamo, docs/design-docs/planner-design.md (320e674: load-based scaling) and
docs/components/planner/planner-guide.md (092029e: defaults), with the check of what remains after a removal (pull
request 9294). Every five seconds: one replica more if the estimated time to first token, or between tokens, of ALL
engines is over its target; one fewer if N/(N-1) of each engine's load leaves what its queue adds under 80 % of what the
target leaves, the time between tokens under 80 % of its own, and fits the cache. Nothing while a replica starts, and
nothing while an engine does not tell. It goes no lower than one replica.

Dynamo fits step times to what engines report; the fit that Pagemill's engines publish stands in for that.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from pagemill_protocol.load import EnginesLoad
from pagemill_protocol.state import StepTimeParams
from pagemill_protocol.step_time import StepTimeModel
from pagemill_simulator.parameters import Parameters, Positive, Share
from pagemill_simulator.scaling.measured import EngineSeen, Timer, engines, within
from pagemill_simulator.scaling.policy import Bounds, Seen

RATE_WINDOW_S = 60.0
ROUNDS = 8


class Dynamo(Parameters, frozen=True, kw_only=True):
    """Estimated latencies of all engines, one replica at a time."""

    name: ClassVar[str] = "dynamo"
    ttft_ms: Positive = 500.0
    """Target of the time to first token."""
    itl_ms: Positive = 50.0
    """Target of the time between tokens."""
    sensitivity: Share = 0.8
    """`load_scaling_down_sensitivity`: the share of the targets that must do after a removal."""
    interval_s: Positive = 5.0
    """`load_adjustment_interval`: between decisions."""

    def policy(self, bounds: Bounds) -> DynamoLoad:
        return DynamoLoad(bounds, self)


class Work(NamedTuple):
    """Of one engine."""

    queued_tokens: float
    """Of prompts that wait."""
    context_tokens: float
    """Read by those that run."""
    num_running: int

    def times(self, factor: float) -> Work:
        return self._replace(queued_tokens=self.queued_tokens * factor, context_tokens=self.context_tokens * factor)


class Estimator:
    """Of latencies of one kind of engine."""

    def __init__(
        self, step_time: StepTimeModel, *, prompt_tokens: float, step_tokens: int, prompt_tokens_per_s: float
    ) -> None:
        """`prompt_tokens_per_s`: that come to one engine."""
        self._step_time = step_time
        self._prompt_tokens = prompt_tokens
        self._step_tokens = step_tokens
        self._rate = prompt_tokens_per_s

    def ttft_ms(self, work: Work) -> float:
        """What waits and the next request, in chunks beside the answers."""
        room = max(1.0, self._step_tokens - work.num_running)
        full, rest = divmod(work.queued_tokens + self._prompt_tokens, room)
        return full * self._step_ms(room, work) + (self._step_ms(rest, work) if rest else 0.0)

    def itl_ms(self, work: Work) -> float:
        """A step with one answer more, and the prompts that come on average during one."""
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


class DynamoLoad:
    name = Dynamo.name
    wakes_at_once = False

    def __init__(self, bounds: Bounds, parameters: Dynamo | None = None) -> None:
        self._bounds = bounds
        self._parameters = parameters or Dynamo()
        self.interval_s = self._parameters.interval_s
        self._timer = Timer(self.interval_s)
        self._arrived: list[tuple[float, int]] = []
        self._fit: tuple[StepTimeParams, StepTimeModel | None] = (StepTimeParams(), None)

    def decide(self, seen: Seen) -> int:
        wanted = within(self._bounds, seen.wanted, least=1)
        if not self._timer.is_due(seen.at_s):
            return wanted
        rate = self._prompt_tokens_per_s(seen)
        told = engines(seen)
        if not told or len(told) != seen.wanted:
            return wanted
        estimator = self._estimator(seen, rate / len(told))
        if estimator is None:
            return wanted
        capacity = _cache_tokens(seen.signals.engines)
        works = [_work(engine, capacity, _prompt_tokens(seen)) for engine in told]
        return within(self._bounds, len(told) + step(works, estimator, capacity, self._parameters), least=1)

    def _estimator(self, seen: Seen, rate: float) -> Estimator | None:
        """None: the engines have not told enough yet."""
        told = seen.signals.engines
        model = self._model(told.step_time)
        if model is None or told.max_step_tokens <= 0 or not _cache_tokens(told) or not seen.num_arrived:
            return None
        return Estimator(
            model,
            prompt_tokens=_prompt_tokens(seen),
            step_tokens=told.max_step_tokens,
            prompt_tokens_per_s=rate,
        )

    def _model(self, params: StepTimeParams) -> StepTimeModel | None:
        if self._fit[0] != params:
            try:
                model = StepTimeModel.from_params(params)
            except ValueError:
                model = None
            self._fit = params, model if model is not None and model.known else None
        return self._fit[1]

    def _prompt_tokens_per_s(self, seen: Seen) -> float:
        if self._arrived and seen.at_s < self._arrived[-1][0]:
            self._arrived.clear()
        self._arrived.append((seen.at_s, seen.num_prompt_tokens_arrived))
        while len(self._arrived) > 2 and self._arrived[1][0] <= seen.at_s - RATE_WINDOW_S:
            self._arrived.pop(0)
        (begin_s, before), (end_s, after) = self._arrived[0], self._arrived[-1]
        return max(0, after - before) / (end_s - begin_s) if end_s > begin_s else 0.0


def step(works: list[Work], estimator: Estimator, capacity: float, parameters: Dynamo) -> int:
    """One replica more, one fewer, or none. `capacity`: tokens that the cache of an engine holds."""
    if all(estimator.ttft_ms(work) > parameters.ttft_ms for work in works):
        return 1
    if all(estimator.itl_ms(work) > parameters.itl_ms for work in works):
        return 1
    if len(works) < 2:
        return 0
    factor = len(works) / (len(works) - 1)
    return -1 if all(_bears(work.times(factor), estimator, capacity, parameters) for work in works) else 0


def _bears(work: Work, estimator: Estimator, capacity: float, parameters: Dynamo) -> bool:
    """An engine, this load after one of the others is gone."""
    held = work.context_tokens + work.queued_tokens
    if held >= capacity:
        return False
    own_ms = estimator.ttft_ms(work._replace(queued_tokens=0.0))
    left_ms = (parameters.ttft_ms - own_ms) * parameters.sensitivity
    if left_ms <= 0 or estimator.ttft_ms(work) - own_ms >= left_ms:
        return False
    all_running = work._replace(context_tokens=held)
    return estimator.itl_ms(all_running) < parameters.itl_ms * parameters.sensitivity


def _work(engine: EngineSeen, capacity: float, prompt_tokens: float) -> Work:
    return Work(engine.num_waiting * prompt_tokens, engine.kv_usage * capacity, engine.num_running)


def _prompt_tokens(seen: Seen) -> float:
    """Of a request, mean of the latest, else of all."""
    mean = seen.signals.lengths.computed.mean()
    if mean is not None and math.isfinite(mean):
        return mean
    return seen.num_prompt_tokens_arrived / max(1, seen.num_arrived)


def _cache_tokens(told: EnginesLoad) -> float:
    """Of one engine; 0: not told."""
    return told.num_blocks_total * told.block_size / told.num_reporting if told.num_reporting > 0 else 0.0
