"""A device for the engine's tests that checks every step. Helpers with real tensors are in `model/conftest.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from kv_machine import overlapped
from recurrent_rows import RecurrentRows

from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.step import StepPlan, StepResult, TableChanges, TokenLogprobs
from pagemill_protocol.report.cache_kinds import FULL, CacheKind


class DeviceFault(RuntimeError):
    """Raised if the checking device refuses a plan or was configured to fail."""


POISON = -1


@dataclass
class Handle:
    plan: StepPlan
    result: StepResult = field(default_factory=StepResult)
    error: Exception | None = None


class CheckingRunner:
    """A device whose caches contain token ids: every slot has a digest of the whole prefix up to its token.

    A row's next token is computed from its own slots, and every slot that it reads in any cache kind is compared with
    the digest of its tokens. So a wrong block, a missed copy, a second writer or a block that was freed too early is
    detected at once. A row that is marked to fail writes
    poison, and a row that reads poison gets a wrong token. Steps run in order when they are launched; `wait` raises a
    failure, and steps launched after a failed one do not run. `trace` records the order of calls.
    """

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.slots: dict[tuple[int, int], int] = {}
        """By cache kind and slot."""
        self.rows: dict[str, dict[str, Any]] = {}
        self.plans: list[StepPlan] = []
        self.trace: list[tuple[str, int]] = []
        self.unread: list[Handle] = []
        self.sleeps = False
        self.num_vectors = sum(not kind.state for kind in info.kinds)
        self.recurrent = RecurrentRows(info.block_size)
        """States of the kind behind those of vectors, if the model has one."""
        self.raise_on: Callable[[StepPlan], bool] = lambda plan: False
        self.raise_early: Callable[[StepPlan], bool] = lambda plan: False
        self.fail_rows: Callable[[StepPlan], dict[str, str]] = lambda plan: {}

    def launch(self, plan: StepPlan) -> Handle:
        assert not self.sleeps, "a step was launched on a sleeping device"
        self.plans.append(plan)
        self.trace.append(("launch", plan.step))
        handle = Handle(plan)
        try:
            if any(before.error is not None for before in self.unread):
                raise DeviceFault("the step before failed")
            if self.info.stages > 1:
                self._check_stages(plan)
            handle.result = self._run(plan)
        except Exception as error:
            handle.error = error
        self.unread.append(handle)
        return handle

    def _check_stages(self, plan: StepPlan) -> None:
        """The first stage computes this step before the last one has computed those that were not read."""
        most = self.info.stages + 1
        if len(self.unread) >= most:
            raise DeviceFault(f"more than {most} steps are in flight")
        for before in self.unread:
            if early := before.plan.samples & plan.num_scheduled_tokens.keys():
                raise DeviceFault(f"the tokens of {early} are not known yet")

    def wait(self, handle: Handle) -> StepResult:
        self.trace.append(("wait", handle.plan.step))
        while self.unread.pop(0) is not handle:
            pass
        if handle.error is not None:
            raise handle.error
        return handle.result

    def _run(self, plan: StepPlan) -> StepResult:
        if self.raise_early(plan):
            raise DeviceFault("made to fail before anything was copied")
        self._apply(plan)
        if self.raise_on(plan):
            raise DeviceFault("made to fail")
        failed = self.fail_rows(plan)
        for name, proposed in plan.proposals.items():
            for token_id in proposed:
                self._append(self.rows[name], token_id)
        spoiled = self._recur(plan, set(failed))
        writers: dict[tuple[int, int], str] = {}
        for name, count in plan.num_scheduled_tokens.items():
            row = self.rows[name]
            for position in range(row["computed"], row["computed"] + count):
                for kind in range(self.num_vectors):
                    slot = self._slot(kind, row, position)
                    if slot in writers:
                        raise DeviceFault(f"{name} and {writers[slot]} both write slot {slot}")
                    writers[slot] = name
                    self._destroy(kind, slot[1] // self.info.block_size)
                    self.slots[slot] = POISON if name in failed else row["digests"][position]
            row["computed"] += count
        sound = {
            name: self._reads_well(name, count) and name not in spoiled
            for name, count in plan.num_scheduled_tokens.items()
        }
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[TokenLogprobs]] = {}
        prompt_logprobs = {name: self._of_prompt(name, plan) for name in plan.prompt_targets if name not in failed}
        for name in plan.num_scheduled_tokens:
            row = self.rows[name]
            if (name in plan.samples) != (row["computed"] == len(row["tokens"])):
                raise DeviceFault(f"{name} samples at the wrong time")
            if name in plan.samples:
                proposed = plan.proposals.get(name, [])
                digests = row["digests"][-1 - len(proposed) :] if sound[name] else [POISON]
                tokens[name], read = self._sampled(row, digests, proposed)
                if row["num_logprobs"] is not None and name not in failed:
                    pairs = zip(read, tokens[name], strict=True)
                    logprobs[name] = [self._logprobs(digest, token, row["num_logprobs"]) for digest, token in pairs]
                num_rejected = 1 + len(proposed) - len(tokens[name])
                row["computed"] -= num_rejected
                if self.num_vectors < len(self.info.kinds):
                    self.recurrent.withdraw(name, num_rejected)
                for own in (row["tokens"], row["digests"]):
                    del own[len(own) - num_rejected :]
                self._append(row, tokens[name][-1])
        token_ids = {name: sampled for name, sampled in tokens.items() if name not in failed}
        return StepResult(token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs, failed=failed)

    def _recur(self, plan: StepPlan, failing: set[str]) -> set[str]:
        """Compute the recurrent layers, if there are some. Returns the rows that read what a failed row wrote."""
        if self.num_vectors == len(self.info.kinds):
            return set()
        steps = {
            name: (self.rows[name]["tokens"], self.rows[name]["computed"], count, len(plan.proposals.get(name, [])))
            for name, count in plan.num_scheduled_tokens.items()
        }
        return self.recurrent.run(steps, failing, lambda slot, states: self._write(self.num_vectors, slot, states))

    def _sampled(self, row: dict[str, Any], digests: list[int], proposed: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that follow the prefixes of `digests` as long as they were proposed, and those digests."""
        tokens: list[int] = []
        for digest in digests:
            tokens.append(hash((digest, row["seed"], row["choice"])) % self.info.vocab_size)
            if tokens != proposed[: len(tokens)]:
                break
        return tokens, digests[: len(tokens)]

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
                "blocks": [[None] * each.first + each.block_ids for each in admitted.tables],
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
            for held in admitted.tables[self.num_vectors :]:
                self.recurrent.admit(admitted.request_id, admitted.num_computed_tokens, held.first, held.block_ids)
        for kind, changes in enumerate(plan.tables[: self.num_vectors]):
            self._change(kind, changes)
        for changes in plan.tables[self.num_vectors :]:
            for name, index, block_id in changes.placed:
                self.recurrent.place(name, index, block_id)
        copies = [(kind, *pair) for kind, changes in enumerate(plan.tables) for pair in changes.copies]
        content = [(kind, copy, self._read(kind, source)) for kind, source, copy in copies]
        for kind, copy, values in content:
            self._write(kind, copy, values)

    def _read(self, kind: int, block_id: int) -> Any:
        if kind == self.num_vectors:
            return self.recurrent.slots.get(block_id, "nothing")
        size = self.info.block_size
        return [self.slots.get((kind, block_id * size + offset)) for offset in range(size)]

    def _write(self, kind: int, block_id: int, values: Any) -> None:
        self._destroy(kind, block_id)
        if kind == self.num_vectors:
            self.recurrent.slots[block_id] = values
            return
        for offset, value in enumerate(values):
            if value is not None:
                self.slots[kind, block_id * self.info.block_size + offset] = value

    def _destroy(self, kind: int, block_id: int) -> None:
        """Destroy what the other kind has in the bytes of a block, if they share memory."""
        if not self.info.shares_memory:
            return
        size = self.info.block_size
        for other_kind, other in overlapped(self.info.kinds, self.info.blocks_of_kinds, kind, block_id):
            if other_kind == self.num_vectors:
                self.recurrent.slots.pop(other, None)
            else:
                for offset in range(size):
                    self.slots.pop((other_kind, other * size + offset), None)

    def _change(self, kind: int, changes: TableChanges) -> None:
        for name, block_ids in changes.appended.items():
            self.rows[name]["blocks"][kind] += block_ids
        for name, index, block_id in changes.placed:
            self.rows[name]["blocks"][kind][index] = block_id
        for name, first, end in changes.dropped:
            if name in self.rows:
                self.rows[name]["blocks"][kind][first:end] = [None] * (end - first)

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

    def _slot(self, kind: int, row: dict[str, Any], position: int) -> tuple[int, int]:
        size = self.info.block_size
        block_id = row["blocks"][kind][position // size]
        if block_id is None:
            raise DeviceFault(f"a row still needs the block at position {position}, which was freed")
        return kind, int(block_id * size + position % size)

    def _reads_well(self, name: str, count: int) -> bool:
        """Whether the row, which has computed `count` tokens, reads no poison."""
        row, sound = self.rows[name], True
        for kind, each in enumerate(self.info.kinds[: self.num_vectors]):
            first = 0 if each.window is None else max(0, row["computed"] - count - each.window + 1)
            for position in range(first, row["computed"]):
                content = self.slots.get(self._slot(kind, row, position))
                sound = sound and content != POISON
                if content not in (POISON, row["digests"][position]):
                    raise DeviceFault(f"{name} reads foreign or missing KV at position {position}")
        return sound


@pytest.fixture
def checking_runner() -> Callable[..., CheckingRunner]:
    """Return a function that makes devices that check what every row reads."""

    def make(
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        vocab_size: int = 1000,
        windows: tuple[int | None, ...] = (None,),
        num_states: int = 0,
        stages: int = 1,
        state_bytes: int = 0,
    ) -> CheckingRunner:
        """`state_bytes`: of a state that shares memory with the first kind, whose blocks have 1,024."""
        info = RunnerInfo(num_blocks, block_size, max_model_len, vocab_size, "weights", "kv", 0, 0, "none")
        kinds = tuple(FULL if window is None else CacheKind(f"window-{window}", window) for window in windows)
        kinds = tuple(msgspec.structs.replace(kind, block_bytes=1024) for kind in kinds)
        counts = (num_blocks,) * len(kinds)
        if num_states:
            state = CacheKind("state", state=True, block_bytes=state_bytes or 1024)
            kinds, counts = (*kinds, state), (*counts, num_states)
        shares = state_bytes > 0
        return CheckingRunner(info._replace(kinds=kinds, kind_blocks=counts, stages=stages, shares_memory=shares))

    return make
