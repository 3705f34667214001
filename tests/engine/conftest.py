"""A device for the engine's tests that checks every step. Helpers with real tensors are in `model/conftest.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagemill_engine.executing.base import RunnerInfo
from pagemill_engine.scheduler.step import StepPlan, StepResult, TableChanges, TokenLogprobs


class DeviceFault(RuntimeError):
    """Raised if the checking device refuses a plan or was configured to fail."""


POISON = -1


@dataclass
class Handle:
    plan: StepPlan
    result: StepResult = field(default_factory=StepResult)
    error: Exception | None = None


class CheckingRunner:
    """A device whose KV cache contains token ids: every slot has a digest of the whole prefix up to its token.

    A row's next token is computed from its own slots, and every slot that it reads is compared with the digest of its
    tokens. So a wrong block, a missed copy or a second writer is detected at once. A row that is marked to fail writes
    poison, and a row that reads poison gets a wrong token. Steps run in order when they are launched; `wait` raises a
    failure, and steps launched after a failed one do not run. `trace` records the order of calls.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.slots: dict[int, int] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.plans: list[StepPlan] = []
        self.trace: list[tuple[str, int]] = []
        self.unread: list[Handle] = []
        self.sleeps = False
        self.raise_on: Callable[[StepPlan], bool] = lambda plan: False
        self.fail_rows: Callable[[StepPlan], dict[str, str]] = lambda plan: {}

    def launch(self, plan: StepPlan) -> Handle:
        assert not self.sleeps, "a step was launched on a sleeping device"
        self.plans.append(plan)
        self.trace.append(("launch", plan.step))
        handle = Handle(plan)
        try:
            if any(before.error is not None for before in self.unread):
                raise DeviceFault("the step before failed")
            handle.result = self._run(plan)
        except Exception as error:
            handle.error = error
        self.unread.append(handle)
        return handle

    def wait(self, handle: Handle) -> StepResult:
        self.trace.append(("wait", handle.plan.step))
        while self.unread.pop(0) is not handle:
            pass
        if handle.error is not None:
            raise handle.error
        return handle.result

    def _run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        if self.raise_on(plan):
            raise DeviceFault("made to fail")
        failed = self.fail_rows(plan)
        writers: dict[int, str] = {}
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            for position in range(row["computed"], row["computed"] + count):
                slot = self._slot(row, position)
                if slot in writers:
                    raise DeviceFault(f"{name} and {writers[slot]} both write slot {slot}")
                writers[slot] = name
                self.slots[slot] = POISON if name in failed else row["digests"][position]
            row["computed"] += count
        sound = {name: self._reads_well(name) for name in plan.num_scheduled_tokens}
        tokens = {}
        logprobs = {}
        prompt_logprobs = {name: self._of_prompt(name, plan) for name in plan.prompt_targets if name not in failed}
        for name in plan.num_scheduled_tokens:
            row = self.rows[name]
            if (name in plan.samples) != (row["computed"] == len(row["tokens"])):
                raise DeviceFault(f"{name} samples at the wrong time")
            if name in plan.samples:
                digest = row["digests"][-1] if sound[name] else POISON
                tokens[name] = hash((digest, row["seed"], row["choice"])) % self.info.vocab_size
                if row["num_logprobs"] is not None and name not in failed:
                    logprobs[name] = [self._logprobs(digest, tokens[name], row["num_logprobs"])]
                self._append(row, tokens[name])
        token_ids = {name: [token] for name, token in tokens.items() if name not in failed}
        return StepResult(token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs, failed=failed)

    def _of_prompt(self, name: str, plan: StepPlan) -> list[TokenLogprobs]:
        """Return the log probabilities of the prompt's tokens that follow a token of this step."""
        row, targets = self.rows[name], plan.prompt_targets[name]
        place = row["computed"] - plan.num_scheduled_tokens[name] + targets.offset
        if place != targets.first or place + len(targets.token_ids) > row["computed"]:
            raise DeviceFault(f"{name} reports tokens that follow none of this step")
        if row["tokens"][place + 1 : place + 1 + len(targets.token_ids)] != targets.token_ids:
            raise DeviceFault(f"{name} reports other tokens than its own")
        digests = row["digests"][place : place + len(targets.token_ids)]
        pairs = zip(digests, targets.token_ids, strict=True)
        return [self._logprobs(digest, token_id, targets.num_top) for digest, token_id in pairs]

    def sleep(self) -> int:
        assert not self.sleeps
        assert not self.unread
        self.sleeps = True
        num_slots = len(self.slots)
        self.slots.clear()
        return num_slots

    def wake(self) -> None:
        assert self.sleeps
        self.sleeps = False

    def close(self) -> None:
        self.rows.clear()

    def _apply(self, plan: StepPlan) -> None:
        for name in plan.released:
            self.rows.pop(name, None)
        for admitted in plan.admitted:
            row: dict[str, Any] = {
                "tokens": [],
                "digests": [],
                "blocks": list(admitted.tables[0].block_ids),
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
        for changes in plan.tables:
            self._change(changes)

    def _change(self, changes: TableChanges) -> None:
        for name, block_ids in changes.appended.items():
            self.rows[name]["blocks"] += block_ids
        for name, index, block_id in changes.placed:
            self.rows[name]["blocks"][index] = block_id
        size = self.info.block_size
        content = {
            copy: [self.slots.get(source * size + offset) for offset in range(size)] for source, copy in changes.copies
        }
        for copy, values in content.items():
            for offset, value in enumerate(values):
                if value is not None:
                    self.slots[copy * size + offset] = value

    def _logprobs(self, read: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Return a distribution that depends on the prefix alone."""
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

    def _reads_well(self, name: str) -> bool:
        """Whether the row reads no poison."""
        row, sound = self.rows[name], True
        for position in range(row["computed"]):
            content = self.slots.get(self._slot(row, position))
            sound = sound and content != POISON
            if content not in (POISON, row["digests"][position]):
                raise DeviceFault(f"{name} reads foreign or missing KV at position {position}")
        return sound


@pytest.fixture
def checking_runner() -> Callable[..., CheckingRunner]:
    """Return a function that makes devices that check what every row reads."""

    def make(
        num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128, vocab_size: int = 1000
    ) -> CheckingRunner:
        info = RunnerInfo(num_blocks, block_size, max_model_len, vocab_size, "weights", "kv", 0, 0, "none")
        return CheckingRunner(info)

    return make
