"""An engine's core that serves adapters, without processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

NUM_TOKENS = 6


class Engine:
    def __init__(self, model: Path, **settings: Any) -> None:
        values: dict[str, Any] = {
            "model": str(model), "dtype": "float32", "num_kv_blocks": 512, "enable_lora": True, "max_loras": 8,
            "max_lora_rank": 16, "max_num_seqs": 32, **settings,
        }  # fmt: skip
        config = EngineConfig(**values)
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        self._count = 0

    def load(self, path: Path) -> str:
        assert self.core.adapters is not None
        return self.core.adapters.load(path).digest

    def add(self, name: str, prompt: list[int], digest: str, num_tokens: int = NUM_TOKENS, **more: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **more)
        self.core.add(
            GenerateRequest(
                request_id=name, model="m", prompt_token_ids=prompt, adapter_digest=digest, sampling=sampling
            )
        )

    def greedy(
        self, prompts: Sequence[list[int]], digests: Sequence[str], num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for prompt, digest in zip(prompts, digests, strict=True):
            name = f"request-{self._count}"
            self._count += 1
            answers[name] = []
            self.add(name, prompt, digest, num_tokens)
        for out in self._outputs():
            answers[out.request_id] += out.token_ids
        return list(answers.values())

    def scores(self, prompt: list[int], digest: str) -> list[float]:
        """Return the log probabilities of the prompt's tokens from the second on."""
        self.add("scored", prompt, digest, 1, prompt_logprobs=0)
        return [each.logprobs[0] for out in self._outputs() for each in out.prompt_logprobs]

    def _outputs(self) -> Iterator[TokensOut]:
        while self.core.has_work:
            for out in self.core.step().outputs:
                assert out.error is None, out.error
                yield out
