"""Helpers of the engine's tests: a checking device. Those with real tensors are in `model/conftest.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pagemill_engine.runner.base import RunnerInfo
from pagemill_engine.scheduler.step import StepPlan, StepResult, TokenLogprobs


class DeviceFault(RuntimeError):
    """The checking device refuses a plan, or was told to fail."""


class CheckingRunner:
    """A device whose KV is made of token ids: every slot holds a digest of the whole prefix that led to it.

    A row's next token is computed from what it reads in its own slots, and every slot it reads is compared with what
    its tokens say must be there. So a wrong block, a missed copy or a second writer shows at once.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.slots: dict[int, int] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.plans: list[StepPlan] = []
        self.raise_on: Callable[[StepPlan], bool] = lambda plan: False
        self.fail_rows: Callable[[StepPlan], dict[str, str]] = lambda plan: {}

    def launch(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        self._apply(plan)
        if self.raise_on(plan):
            raise DeviceFault("told to fail")
        writers: dict[int, str] = {}
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            for position in range(row["computed"], row["computed"] + count):
                slot = self._slot(row, position)
                if slot in writers:
                    raise DeviceFault(f"{name} and {writers[slot]} both write slot {slot}")
                writers[slot] = name
                self.slots[slot] = row["digests"][position]
            row["computed"] += count
        for name in plan.num_scheduled_tokens:
            self._check_reads(name)
        return plan

    def wait(self, handle: StepPlan) -> StepResult:
        failed = self.fail_rows(handle)
        tokens = {}
        logprobs = {}
        for name in handle.num_scheduled_tokens:
            row = self.rows[name]
            if (name in handle.samples) != (row["computed"] == len(row["tokens"])):
                raise DeviceFault(f"{name} samples at the wrong time")
            if name in handle.samples and name not in failed:
                read = self.slots[self._slot(row, row["computed"] - 1)]
                tokens[name] = hash((read, row["seed"], row["choice"])) % self.info.vocab_size
                if row["num_logprobs"] is not None:
                    logprobs[name] = self._logprobs(read, tokens[name], row["num_logprobs"])
                self._append(row, tokens[name])
        return StepResult(token_ids=tokens, logprobs=logprobs, failed=failed)

    def close(self) -> None:
        self.rows.clear()

    def _apply(self, plan: StepPlan) -> None:
        for name in plan.released:
            self.rows.pop(name, None)
        for admitted in plan.admitted:
            row: dict[str, Any] = {
                "tokens": [],
                "digests": [],
                "blocks": list(admitted.block_ids),
                "computed": admitted.num_computed_tokens,
                "seed": admitted.seed,
                "choice": admitted.choice,
                "num_logprobs": admitted.sampling.logprobs,
            }
            if admitted.request_id in self.rows:
                raise DeviceFault(f"{admitted.request_id} is admitted twice")
            for token_id in admitted.token_ids:
                self._append(row, token_id)
            self.rows[admitted.request_id] = row
        for name, block_ids in plan.new_block_ids.items():
            self.rows[name]["blocks"] += block_ids
        for name, index, block_id in plan.replaced_blocks:
            self.rows[name]["blocks"][index] = block_id
        size = self.info.block_size
        content = {
            copy: [self.slots.get(source * size + offset) for offset in range(size)]
            for source, copy in plan.block_copies
        }
        for copy, values in content.items():
            for offset, value in enumerate(values):
                if value is not None:
                    self.slots[copy * size + offset] = value

    def _logprobs(self, read: int, token_id: int, num_top: int) -> TokenLogprobs:
        """A distribution that depends on the prefix alone."""
        odds = {token: 1 + hash((read, token)) % 997 for token in range(self.info.vocab_size)}
        total = sum(odds.values())
        values = {token: math.log(count / total) for token, count in odds.items()}
        top = sorted(values, key=lambda token: (-values[token], token))
        rank = top.index(token_id) + 1
        top = top[:num_top]
        return TokenLogprobs([token_id, *top], [values[token_id], *(values[token] for token in top)], rank)

    def _append(self, row: dict[str, Any], token_id: int) -> None:
        before = row["digests"][-1] if row["digests"] else 0
        row["tokens"].append(token_id)
        row["digests"].append(hash((before, token_id)))

    def _slot(self, row: dict[str, Any], position: int) -> int:
        size = self.info.block_size
        return int(row["blocks"][position // size] * size + position % size)

    def _check_reads(self, name: str) -> None:
        row = self.rows[name]
        for position in range(row["computed"]):
            if self.slots.get(self._slot(row, position)) != row["digests"][position]:
                raise DeviceFault(f"{name} reads foreign or missing KV at position {position}")


@pytest.fixture
def checking_runner() -> Callable[..., CheckingRunner]:
    """Makes devices that check what every row reads."""

    def make(
        num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128, vocab_size: int = 1000
    ) -> CheckingRunner:
        return CheckingRunner(RunnerInfo(num_blocks, block_size, max_model_len, vocab_size, "weights", "kv", 0, 0))

    return make
