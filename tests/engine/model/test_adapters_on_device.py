"""Adapters on the GPU's runner, on a device or in Triton's interpreter: answers are the CPU's, also with graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft_adapters import ATTENTION, PROMPTS, Base, write_adapter, write_base

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.runners.device.graphs import GraphShape
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 16, "max_model_len": 64, "max_num_seqs": 4, "enable_lora": True, "max_loras": 2,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "llama of one layer": {
        "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    },
    "mixtral of one layer": {
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}  # fmt: skip
Answers = list[tuple[list[int], list[float]]]


class Recorder:
    """Replaces CUDA graphs if there is no device: a captured function runs again on the same buffers."""

    def __init__(self) -> None:
        self.num_run = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def again() -> None:
            self.num_run += 1
            run()

        return again


class Engine:
    def __init__(self, runner: Any, folders: list[Path]) -> None:
        config = EngineConfig(model="m", max_num_batched_tokens=24, **SETTINGS)
        self.core = EngineCore(config, runner)
        assert self.core.adapters is not None
        self.digests = ["", *(self.core.adapters.load(folder).digest for folder in folders)]
        self._count = 0

    def answers(self, order: list[int], **settings: Any) -> Answers:
        """Return tokens and log probabilities of requests for the base (0) and for adapters (from 1 on)."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1, **{"temperature": 0.0, **settings})
        for index, adapter in enumerate(order):
            name = f"r{self._count}"
            self._count += 1
            found[name] = ([], [])
            request = GenerateRequest(
                request_id=name, model="m", prompt_token_ids=PROMPTS[index][:3], sampling=sampling,
                adapter_digest=self.digests[adapter],
            )  # fmt: skip
            self.core.add(request)
        while self.core.has_work:
            for out in self.core.step().outputs:
                assert out.error is None, out.error
                found[out.request_id][0].extend(out.token_ids)
                found[out.request_id][1].extend(entry.logprobs[0] for entry in out.logprobs or [])
        return list(found.values())


def assert_alike(found: Answers, expected: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, other) in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)


def engines(name: str, settings: dict[str, Any], folder: Path, runner_loader: Callable[..., Any]) -> list[Engine]:
    """Return an engine on the CPU and one on the device, with three adapters."""
    base: Base = write_base(name, folder / "base")
    folders = [
        write_adapter(base, folder / str(seed), seed, **settings, r=4 * seed, lora_alpha=8).folder for seed in (1, 2, 3)
    ]
    backends: list[dict[str, Any]] = [{"backend": "cpu"}, {"device": "cuda"}]
    return [Engine(runner_loader(base.folder, **SETTINGS, **each), folders) for each in backends]


def test_decodes_with_adapters_run_as_graphs(tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    on_cpu, on_gpu = engines("llama of one layer", {"target_modules": ["q_proj", "lm_head"]}, tmp_path, runner_loader)
    expected, recorder, runner = on_cpu.answers([1, 0]), Recorder(), on_gpu.core.runner
    assert len({tuple(tokens) for tokens, _ in expected}) == 2
    runner.capture_graphs([GraphShape(2, 2, True)], lambda: recorder)
    assert_alike(on_gpu.answers([1, 0]), expected)
    assert recorder.num_run > 0
    assert on_gpu.core.adapters is not None
    assert on_gpu.core.adapters.counts() == ([], [])


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_a_gpu_gives_the_answers_of_the_cpu(name: str, tmp_path: Path, runner_loader: Callable[..., Any]) -> None:
    on_cpu, on_gpu = engines(name, TARGETS[name], tmp_path, runner_loader)
    order = [1, 0, 2, 3]  # the last one waits for a slot, and replaces another adapter
    expected, reported = on_cpu.answers(order), on_cpu.answers([2, 0], prompt_logprobs=1)
    assert len({tuple(tokens) for tokens, _ in expected}) == 4
    assert_alike(on_gpu.answers(order), expected)
    assert_alike(on_gpu.answers([2, 0], prompt_logprobs=1), reported)
    if name.startswith("mixtral"):
        return
    recorder, runner = Recorder(), on_gpu.core.runner
    runner.capture_graphs([GraphShape(4, 4, True), GraphShape(16, 4, False)], lambda: recorder)
    runner._forward.logits = None  # called if no graph fits
    assert_alike(on_gpu.answers(order), expected)
    assert recorder.num_run >= 4
