"""A runner without a device: it waits the predicted time and generates tokens that depend only on the request.

It serves the simulator (with a virtual clock), scheduler benchmarks and tests of everything above the runner. It keeps
block tables as bookkeeping and refuses plans that break the contract of `step`, so that a fault of the
scheduler shows here before it corrupts a real cache. A token depends on (seed, choice, position) only: batch, chunking
and preemption do not change the output. Steps queue up behind each other as on a device.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.sizing.kv_sizes import CacheBlocks
from pagemill_execution.step import AdmittedSequence, PromptTargets, StepPlan, StepResult, TokenLogprobs
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel

DEFAULT_STEP_TIME = StepTimeParams(
    knots_tokens=[1, 64, 512, 2048, 8192],
    knot_ms=[6.0, 8.0, 22.0, 80.0, 320.0],
    decode_context_ms=1e-5,
    chunk_context_ms=1e-7,
)
"""Step times comparable to an 8B model on one data-centre GPU."""
DEFAULT_NUM_BLOCKS = 4096
DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_VOCAB_SIZE = 32000
_MASK = (1 << 64) - 1


class StepPlanError(RuntimeError):
    """The plan breaks the contract between scheduler and runner."""


NO_BLOCK = -1
"""Stands in a table before the first block that a window needs."""


class NullHandle(NamedTuple):
    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    done_at_s: float


@dataclass(slots=True)
class _Row:
    block_ids: list[int]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    counter_key: int
    num_logprobs: int | None
    named_tokens: list[int] | None


class NullRunner:
    def __init__(
        self,
        info: RunnerInfo,
        step_time: StepTimeParams = DEFAULT_STEP_TIME,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a runner. `clock` returns seconds; `sleep` gets the remaining seconds of a step."""
        self._info = info
        self.step_time = StepTimeModel.from_params(step_time)
        self._clock = clock
        self._sleep = sleep
        self._rows: dict[str, _Row] = {}
        self._with_logprobs: set[str] = set()
        """Ids of the requests that ask for log probabilities."""
        self._busy_until_s = [float("-inf")] * info.stages
        """Of each stage."""
        self._sleeps = False

    @classmethod
    def from_config(
        cls,
        config: ExecutionConfig,
        *,
        serves_adapters: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> NullRunner:
        cache = config.simulated_kinds
        num_blocks = cache.counts[0] if cache is not None else config.num_kv_blocks or DEFAULT_NUM_BLOCKS
        info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len or min(DEFAULT_MAX_MODEL_LEN, num_blocks * config.block_size),
            vocab_size=config.vocab_size or DEFAULT_VOCAB_SIZE,
            weights_digest=hashlib.blake2b(config.model.encode(), digest_size=16).hexdigest(),
            kv_dtype="null",
            weight_bytes=0,
            kv_bytes_per_token=0,
            compute="simulated",
            device="null",
            overlaps=True,
            masks_tokens=False,
            serves_adapters=serves_adapters,
            stages=config.pipeline_parallel_size,
        )
        if cache is not None:
            blocks = CacheBlocks(cache.kinds, cache.counts)
            info = info.with_cache(blocks, shares_memory=cache.shares_memory)
        return cls(info, config.step_time or DEFAULT_STEP_TIME, clock=clock, sleep=sleep)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: StepPlan) -> NullHandle:
        if self._sleeps:
            raise StepPlanError(f"step {plan.step} was launched while the device sleeps")
        self._apply(plan)
        token_ids = self._compute(plan)
        predicted_ms, done_at_s = self.predicted_ms(plan), self._clock()
        for stage, busy_until_s in enumerate(self._busy_until_s):
            self._busy_until_s[stage] = done_at_s = max(done_at_s, busy_until_s) + predicted_ms / 1000
        logprobs = dict(self._logprobs(token_ids)) if self._with_logprobs else {}
        prompts = {name: self._of_prompt(targets) for name, targets in plan.prompt_targets.items()}
        return NullHandle(token_ids, logprobs, prompts, done_at_s)

    def predicted_ms(self, plan: StepPlan) -> float:
        """Return the milliseconds that a step takes."""
        return self.step_time.predict_ms(plan.num_tokens, plan.decode_context_tokens, plan.chunk_context_products)

    def wait(self, handle: NullHandle) -> StepResult:
        left_s = handle.done_at_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return StepResult(handle.token_ids, handle.logprobs, handle.prompt_logprobs)

    def sleep(self) -> int:
        self._sleeps = True
        return 0

    def wake(self) -> None:
        self._sleeps = False

    def close(self) -> None:
        self._rows.clear()
        self._with_logprobs.clear()

    def _apply(self, plan: StepPlan) -> None:
        for name in plan.released:
            self._rows.pop(name, None)
            self._with_logprobs.discard(name)
        for admitted in plan.admitted:
            self._admit(admitted)
        for changes in plan.tables[:1]:  # the kinds behind the first have the same tokens
            for name, block_ids in changes.appended.items():
                self._known(name).block_ids += block_ids
            for name, index, block_id in changes.placed if not self._info.kinds[0].state else ():
                self._known(name).block_ids[index] = block_id

    def _admit(self, admitted: AdmittedSequence) -> None:
        if admitted.request_id in self._rows:
            raise StepPlanError(f"{admitted.request_id} is admitted twice")
        self._rows[admitted.request_id] = _Row(
            block_ids=[NO_BLOCK] * admitted.tables[0].first + list(admitted.tables[0].block_ids),
            num_tokens=len(admitted.token_ids),
            num_prompt_tokens=admitted.num_prompt_tokens,
            num_computed_tokens=admitted.num_computed_tokens,
            counter_key=_mix((admitted.seed & _MASK) ^ _mix(admitted.choice)),
            num_logprobs=admitted.sampling.logprobs,
            named_tokens=admitted.sampling.logprob_token_ids,
        )
        if admitted.sampling.num_alternatives is not None:
            self._with_logprobs.add(admitted.request_id)

    def _compute(self, plan: StepPlan) -> dict[str, list[int]]:
        """Return the tokens of the rows that sample.

        One loop without calls: simulations spend much of their time here.
        """
        rows, samples, block_size, vocab_size = self._rows, plan.samples, self._info.block_size, self._info.vocab_size
        token_ids, proposals, has_vectors = {}, plan.proposals, not self._info.kinds[0].state
        for name, num_tokens in plan.num_scheduled_tokens.items():
            row = rows.get(name)
            if row is None:
                raise StepPlanError(f"{name} is scheduled and was never admitted")
            row.num_computed_tokens = num_computed_tokens = row.num_computed_tokens + num_tokens
            if num_computed_tokens > len(row.block_ids) * block_size and has_vectors:
                raise StepPlanError(f"{name} has too few blocks for {num_computed_tokens} tokens")
            num_known, is_sampled = row.num_tokens, name in samples
            if proposals and name in proposals:
                num_known += len(proposals[name])
            if num_computed_tokens > num_known or is_sampled != (num_computed_tokens == num_known):
                raise StepPlanError(
                    f"{name} computes {num_computed_tokens} of {num_known} tokens, samples={is_sampled}"
                )
            if is_sampled and num_known > row.num_tokens:
                token_ids[name] = self._verify(row, proposals[name])
            elif is_sampled:
                token_ids[name] = [_mix(row.counter_key + num_known - row.num_prompt_tokens) % vocab_size]
                row.num_tokens = num_known + 1
        return token_ids

    def _verify(self, row: _Row, proposed: list[int]) -> list[int]:
        """Return the tokens of a row as far as they agree with the proposed ones, and one more."""
        num_right = self.num_right(row, proposed)
        tokens = [*proposed[:num_right], self._token(row, num_right)]
        row.num_computed_tokens -= 1 + len(proposed) - len(tokens)
        row.num_tokens += len(tokens)
        return tokens

    def num_right(self, row: _Row, proposed: list[int]) -> int:
        """Return how many of the proposed tokens are sampled."""
        pairs = enumerate(proposed)
        return next((place for place, each in pairs if each != self._token(row, place)), len(proposed))

    def _token(self, row: _Row, place: int) -> int:
        """Return the token that is sampled behind `place` others in a step."""
        return _mix(row.counter_key + row.num_tokens - row.num_prompt_tokens + place) % self._info.vocab_size

    def _known(self, name: str) -> _Row:
        row = self._rows.get(name)
        if row is None:
            raise StepPlanError(f"{name} is scheduled and was never admitted")
        return row

    def _logprobs(self, token_ids: dict[str, list[int]]) -> Iterator[tuple[str, list[TokenLogprobs]]]:
        """Yield log probabilities: the chosen token is the most likely, each following id half as likely as the one
        before."""
        for name, sampled in token_ids.items():
            row = self._rows[name]
            if row.named_tokens is not None:
                yield name, [_halving(token_id, row.named_tokens) for token_id in sampled]
            elif row.num_logprobs is not None:
                yield name, [_halving(each, self._following(each, row.num_logprobs)) for each in sampled]

    def _of_prompt(self, targets: PromptTargets) -> list[TokenLogprobs]:
        return [_halving(token_id, self._following(token_id, targets.num_top)) for token_id in targets.token_ids]

    def _following(self, token_id: int, num_top: int) -> list[int]:
        return [(token_id + place) % self._info.vocab_size for place in range(num_top)]


def _halving(token_id: int, others: list[int]) -> TokenLogprobs:
    values = [-math.log(2) * (place + 1) for place in range(len(others))]
    return TokenLogprobs([token_id, *others], [-math.log(2), *values], 1)


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014): 64 well-mixed bits from a counter."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
