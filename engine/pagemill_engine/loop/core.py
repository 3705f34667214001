"""The engine's heart: schedule -> run -> update, once per step.

One failing request never stops the loop: rows that the runner names as failed end alone, when a whole step raises, its
rows are tried one by one until the guilty ones are found, and when the bookkeeping itself raises, the rows it was
working on fail and the rest goes on if everything still adds up. Knows no socket (`loop.process` does) and no tensor
(`runner`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import PrefixEvents, StepOutputs
from pagemill_engine.kv.integrity import IntegrityError, check_integrity
from pagemill_engine.runner.base import Runner, RunnerInfo
from pagemill_engine.scheduler.limits import SchedulerLimits
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_engine.scheduler.step import AdmittedRow, StepPlan, StepResult
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.state import EngineLoad, StepTimeParams
from pagemill_protocol.step_time import StepTimeModel

logger = logging.getLogger(__name__)

_PROBE = "probe"
STEP_TIME_PERIOD_S = 0.5
"""The step-time fit changes slowly: it is sent this often at most."""


class EngineCore:
    """Single-threaded: all calls come from the thread that steps."""

    def __init__(self, config: EngineConfig, runner: Runner, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds; the simulator passes its own."""
        self.config = config
        self.runner = runner
        self.scheduler = Scheduler(scheduler_limits(config, runner.info), clock)
        self.step_time = StepTimeModel(config.max_num_batched_tokens)
        self.num_steps = 0
        self.num_failed_steps_in_a_row = 0
        """Steps that raised since the last one that did not."""
        self._clock = clock
        self._step_ms = 0.0
        self._step_time_sent_s = float("-inf")

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, or raise `PagemillError` with the reason why it cannot be served here."""
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request or one choice of it; each row that was still alive reports `finish_reason="abort"`."""
        self.scheduler.abort(request_id, choice)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def load(self) -> EngineLoad:
        return self.scheduler.load(self._step_ms)

    def step(self) -> StepOutputs:
        """Run one step; returns at once when there is nothing to run.

        Raises only when the bookkeeping is broken beyond the step's own requests.
        """
        try:
            plan = self.scheduler.schedule()
        except BaseException as error:
            plan = StepPlan(step=0, num_scheduled_tokens={})
            self._abandon(None, error)
        if plan.num_scheduled_tokens:
            self._run(plan)
        return self._report(plan)

    def prefix_snapshot(self) -> list[bytes]:
        """All prefix granules cached now; the sum of all `StepOutputs.prefixes` so far."""
        return self.scheduler.kv.prefix_cache.snapshot()

    def check_integrity(self) -> None:
        """Raise `kv.integrity.IntegrityError` when the bookkeeping contradicts itself. Not for the hot path."""
        check_integrity(self.scheduler.kv)
        faults = self.scheduler.find_faults()
        if faults:
            raise IntegrityError("; ".join(faults))

    def probe(self) -> None:
        """Compute one token beside all requests; raises what the runner raises. Skipped when no block is free."""
        pool = self.scheduler.kv.pool
        if pool.num_free == 0:
            return
        blocks = pool.allocate(1)
        row = AdmittedRow(_PROBE, [0], 1, 0, [blocks[0].block_id], SamplingParams(temperature=0.0), 0, 0)
        plan = StepPlan(step=0, num_scheduled_tokens={_PROBE: 1}, admitted=[row], samples={_PROBE})
        plan.released = self.scheduler.swap_released([_PROBE])
        try:
            self.runner.wait(self.runner.launch(plan))
        finally:
            pool.release(blocks)

    def _run(self, plan: StepPlan) -> None:
        started_s = self._clock()
        try:
            result = self.runner.wait(self.runner.launch(plan))
        except Exception as error:
            logger.exception("step %d failed with %d requests", plan.step, len(plan.num_scheduled_tokens))
            self.num_failed_steps_in_a_row += 1
            self.scheduler.step_failed(plan, f"The engine failed on this request: {type(error).__name__}.")
            return
        except BaseException:
            # Ctrl-C in a notebook: its rows must not stay in flight, or no later step could run.
            self.scheduler.step_failed(plan, "The step was interrupted.")
            raise
        try:
            self._finish_step(plan, result, (self._clock() - started_s) * 1000)
        except BaseException as error:
            self._abandon(plan, error)
            return
        self.num_failed_steps_in_a_row = 0

    def _abandon(self, plan: StepPlan | None, error: BaseException) -> None:
        """The scheduler raised: fail what it was working on, and go on if the rest is sound. Ctrl-C goes on its way."""
        logger.error("the scheduler failed", exc_info=error)
        self.num_failed_steps_in_a_row += 1
        self.scheduler.abandon(plan, f"The engine failed on this request's step: {type(error).__name__}.")
        self.check_integrity()
        if not isinstance(error, Exception):
            raise error

    def _finish_step(self, plan: StepPlan, result: StepResult, step_ms: float) -> None:
        self.scheduler.update(plan, result)
        self.num_steps += 1
        self._step_ms = step_ms
        self.step_time.observe(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products, step_ms)

    def _report(self, plan: StepPlan) -> StepOutputs:
        added, removed = self.scheduler.kv.prefix_cache.drain_events()
        return StepOutputs(
            outputs=self.scheduler.take_outputs(),
            load=self.load(),
            step_time=self._step_time_due(),
            prefixes=PrefixEvents(added, removed) if added or removed else None,
            num_step_tokens=plan.num_tokens,
        )

    def _step_time_due(self) -> StepTimeParams | None:
        now_s = self._clock()
        if now_s - self._step_time_sent_s < STEP_TIME_PERIOD_S:
            return None
        self._step_time_sent_s = now_s
        return self.step_time.params()


def scheduler_limits(config: EngineConfig, info: RunnerInfo) -> SchedulerLimits:
    """The runner's room joined with the operator's settings."""
    return SchedulerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
        policy=config.policy,
        enable_prefix_caching=config.enable_prefix_caching,
        # A tokenizer may name tokens that the model has no row for; those can neither come nor be masked.
        eos_token_ids=[token_id for token_id in config.eos_token_ids if token_id < info.vocab_size],
        seed=config.seed,
        weights_digest=info.weights_digest,
        kv_dtype=info.kv_dtype,
    )
