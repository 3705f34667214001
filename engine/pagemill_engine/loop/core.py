"""The engine's loop: schedule, run, update, once per step.

Two loops share all helpers and differ in one thing: `_step_overlapped` launches step N+1, and with several stages later
ones too, before it reads step N, so that no device waits for Python; `_step_plain` has one step in flight at a time.

A failing request never stops the loop. Sequences that the runner reports as failed end alone. When a whole step raises,
its sequences are probed one by one until the failing ones are found. When the scheduler raises, the sequences that it
was processing fail and the others continue if the state is still consistent. Sockets are `loop.process`'s part, tensors
`executing`'s.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import PrefixEvents, StepOutputs
from pagemill_engine.kv.integrity import IntegrityError, check_integrity
from pagemill_engine.loop.grammar_requests import GrammarRequests
from pagemill_engine.loop.limits import scheduler_limits, step_limits
from pagemill_engine.loop.speculation import proposals_of
from pagemill_engine.loop.step_timer import StepTimer, predicted_ms
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.runners.base import Runner
from pagemill_execution.runners.errors import DeviceLostError
from pagemill_execution.step import StepPlan, StepResult
from pagemill_protocol.report.state import EngineLoad, StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_protocol.request.generate import GenerateRequest

if TYPE_CHECKING:
    from pagemill_engine.loop.adapter_requests import AdapterRequests

logger = logging.getLogger(__name__)

STEP_TIME_PERIOD_S = 0.5  # the step-time model changes slowly: it is published at most this often


class Launched(NamedTuple):
    """A launched step that was not read yet."""

    plan: StepPlan
    handle: Any
    started_s: float
    error: Exception | None
    """Exception that the launch raised; it is reported when the step is read."""


class EngineCore:
    """One engine's scheduler and runner. Not thread-safe: all calls must come from the thread that steps."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        proposals: Proposals | None = None,
    ) -> None:
        """Create the core of a loaded runner. `clock`: returns seconds; the simulator passes a virtual one."""
        self.config = msgspec.structs.replace(config, **step_limits(config, runner.info)._asdict())
        self.runner = runner
        self._proposals = proposals or proposals_of(self.config, runner.info, lambda *n: self.step_time.predict_ms(*n))
        self.scheduler = Scheduler(scheduler_limits(config, runner.info), clock, self._proposals, runner.info.stages)
        self.grammar_requests = GrammarRequests(config.model, self.scheduler, runner.info)
        self.adapters: AdapterRequests | None = None
        if runner.info.adapters is not None:
            # Imports readers of files, which engines without adapters do not need.
            from pagemill_engine.loop.adapter_requests import AdapterRequests

            self.adapters = AdapterRequests(runner.info.adapters, self.scheduler, self.grammar_requests)
        self.step_time = StepTimeModel(self.scheduler.limits.max_num_batched_tokens)
        self.step_time.stages, self.step_timer = runner.info.stages, StepTimer()
        self.overlaps = runner.info.overlaps if config.overlap is None else config.overlap
        self.expected_step_ms = 0.0
        """Predicted time of the steps that were begun and not reported, or 0. Other threads read it."""
        self.num_steps = 0
        self.num_failed_steps_in_a_row = 0
        """Number of steps that raised since the last one that succeeded."""
        self._clock = clock
        self._num_stages = runner.info.stages
        self._in_flight: deque[Launched] = deque()  # behind the step that is read; none in the plain loop
        self._step_ms = 0.0
        self._last_read_s = float("-inf")
        self._has_next_step = False  # the last step left work: the next one begins where it ended
        self._step_time_sent_s = float("-inf")

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `PagemillError` with the reason if it cannot be served here."""
        if self.adapters is not None and request.adapter_digest:
            self.adapters.add(request)
        else:
            self.grammar_requests.add(request)

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        """Let each sequence of a request generate up to `allowance` tokens. Ids of ended requests are ignored."""
        self.grammar_requests.raise_allowance(request_id, allowance)
        if self.adapters is not None:
            self.adapters.raise_allowance(request_id, allowance)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Abort a request or one of its choices. Each running sequence reports `finish_reason="abort"`."""
        if choice is None:
            self.grammar_requests.abort(request_id)
            if self.adapters is not None:
                self.adapters.abort(request_id)
        self.scheduler.abort(request_id, choice)

    @property
    def has_work(self) -> bool:
        waits = self.grammar_requests.has_work or (self.adapters is not None and self.adapters.has_work)
        return waits or self.scheduler.has_work or len(self._in_flight) > 0

    def load(self) -> EngineLoad:
        return self.scheduler.load(self._step_ms)

    def step(self) -> StepOutputs:
        """Run one step to its end, if there is anything to run, and return its outputs. Raises only if the state is
        inconsistent beyond the step's own requests, or the device is lost."""
        is_idle = not self.scheduler.has_work and not self._in_flight
        if self.adapters is not None:
            self.adapters.advance(may_wait=is_idle and not self.grammar_requests.has_work)
        self.grammar_requests.queue_compiled(may_wait=is_idle)
        return self._step_overlapped() if self.overlaps else self._step_plain()

    def _step_plain(self) -> StepOutputs:
        step = self._launch()
        if step is not None:
            self._read(step)
        return self._report(step)

    def _step_overlapped(self) -> StepOutputs:
        while len(self._in_flight) <= self._num_stages and (launched := self._launch()) is not None:
            self._in_flight.append(launched)
        step = self._in_flight.popleft() if self._in_flight else None
        if step is not None:
            self._read(step)
        return self._report(step)

    def check_integrity(self) -> None:
        """Raise `kv.integrity.IntegrityError` if the state is inconsistent. Too slow for every step."""
        check_integrity(self.scheduler.kv)
        faults = self.scheduler.find_inconsistencies()
        if faults:
            raise IntegrityError("; ".join(faults))

    def _launch(self) -> Launched | None:
        """Plan the next step and start it. Returns None if nothing can run before the step in flight is read."""
        try:
            plan = self.scheduler.schedule()
        except BaseException as error:
            self._abandon(None, error)
            return None
        if not plan.num_scheduled_tokens:
            return None
        started_s = self._clock()
        waited = self.overlaps and self._has_next_step and not self._in_flight
        if self._proposals is not None and waited and self._num_stages == 1:  # with more all wait anyway
            self._proposals.record_turn((started_s - self._last_read_s) * 1000)
        self.expected_step_ms += predicted_ms(self.step_time, plan)
        try:
            return Launched(plan, self.runner.launch(plan), started_s, None)
        except Exception as error:
            return Launched(plan, None, started_s, error)
        except BaseException:
            self._fail_steps_in_flight(plan)
            raise

    def _read(self, step: Launched) -> None:
        """Wait for the step and apply its results."""
        plan = step.plan
        try:
            if step.error is not None:
                raise step.error
            result = self.runner.wait(step.handle)
        except DeviceLostError:
            raise
        except Exception as error:
            logger.error("step %d failed with %d requests", plan.step, len(plan.num_scheduled_tokens), exc_info=error)
            self.num_failed_steps_in_a_row += 1
            self.scheduler.step_failed(plan, f"The engine failed on this request: {type(error).__name__}.")
            self._wait_for_steps()
            self._last_read_s = self._clock()
            return
        except BaseException:
            self._fail_steps_in_flight(plan)
            raise
        try:
            self._record_step_time(step, result)
            self.scheduler.update(plan, result)
        except BaseException as error:
            self._abandon(plan, error)
            return
        self.num_steps += 1
        self.num_failed_steps_in_a_row = 0

    def _wait_for_steps(self) -> None:
        """Wait for the steps behind a failed one. Their outcome does not matter unless the device is lost."""
        while self._in_flight:
            following = self._in_flight.popleft()
            if following.error is None:
                try:
                    self.runner.wait(following.handle)
                except Exception as error:
                    if isinstance(error, DeviceLostError):
                        raise

    def _fail_steps_in_flight(self, plan: StepPlan) -> None:
        """Fail the steps in flight after Ctrl-C in a notebook; otherwise no later step could run."""
        self._in_flight.clear()
        self.scheduler.step_failed(plan, "The step was interrupted.")

    def _abandon(self, plan: StepPlan | None, error: BaseException) -> None:
        """Fail what the scheduler was processing when it raised, and continue if the rest is consistent. Exceptions
        like KeyboardInterrupt are raised again."""
        logger.error("the scheduler failed", exc_info=error)
        self.num_failed_steps_in_a_row += 1
        self.scheduler.abandon(plan, f"The engine failed on this request's step: {type(error).__name__}.")
        self.check_integrity()
        if not isinstance(error, Exception):
            raise error

    def _record_step_time(self, step: Launched, result: StepResult) -> None:
        """Record the step's time: while there is work, that from one read to the next, all between them included. What
        drafting took is no part of it (`proposing.draft`). With stages it may pass all of them without a wait."""
        now_s = self._clock()
        self._step_ms = (now_s - (self._last_read_s if self._has_next_step else step.started_s)) * 1000
        self._last_read_s, ms = now_s, self._step_ms - result.draft_ms
        ms = min(ms, (now_s - step.started_s) * 1000 / self._num_stages) if self._num_stages > 1 else ms
        if self._proposals is not None:
            self._proposals.record_step(step.plan, result, ms)
        self.step_timer.observe(self.step_time, step.plan, ms, now_s)

    def _report(self, step: Launched | None) -> StepOutputs:
        expected_ms = 0.0
        for following in self._in_flight:
            expected_ms += predicted_ms(self.step_time, following.plan)
        self.expected_step_ms = expected_ms
        added, removed = self.scheduler.kv.drain_events()
        ends = self.grammar_requests.take_ends() + (self.adapters.take_ends() if self.adapters is not None else [])
        outputs = [*ends, *self.scheduler.take_outputs()]
        self._has_next_step = step is not None and self.has_work
        return StepOutputs(
            outputs=outputs,
            load=self.load(),
            step_time=self._step_time_due(),
            prefixes=PrefixEvents(added, removed) if added or removed else None,
            num_step_tokens=step.plan.num_tokens if step is not None else 0,
            gained_ms=self._proposals.take_gain() if self._proposals is not None else 0.0,
        )

    def _step_time_due(self) -> StepTimeParams | None:
        now_s = self._clock()
        if now_s - self._step_time_sent_s < STEP_TIME_PERIOD_S:
            return None
        self._step_time_sent_s = now_s
        return self.step_time.params(*self._proposals.per_decode if self._proposals is not None else ())
