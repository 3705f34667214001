"""Engines over runners of several ranks: tiny models, rounds of requests, and what each answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import expert_models
import torch
import transformers

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.runners.ranks.ranked import RankedRunner
from pagemill_execution.sizing.compute import choose_compute
from pagemill_execution.starting.load_ranks import load_ranks
from pagemill_execution.starting.preparing import ModelFiles
from pagemill_kernels.cpu import launch
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MORE: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 24},
    "Gemma2": {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "DeepseekV2": expert_models.MODELS["deepseek-v2"][1] | {"num_hidden_layers": 2},
}
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
Ranks = Callable[..., RankedRunner]


def saved(kind: str, folder: Path, **more: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**BASE | MORE.get(kind, {}) | more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@contextmanager
def rank_loader() -> Iterator[Ranks]:
    """Yield a function that loads a model on ranks; all are closed at the end."""
    made: list[RankedRunner] = []
    threads = launch.num_threads()

    def load(
        folder: Path, size: int, stuck_seconds: float = 60.0, num_stages: int = 1, **settings: Any
    ) -> RankedRunner:
        parallel = {
            "tensor_parallel_size": size // num_stages, "pipeline_parallel_size": num_stages, "num_threads": size,
        }  # fmt: skip
        config = EngineConfig(model=str(folder), **SETTINGS | parallel | settings)
        spec = load_model_spec(folder)
        files = ModelFiles(config, folder, spec, lambda phase, detail: None)
        made.append(load_ranks(files, choose_compute(config, spec), stuck_seconds))
        return made[-1]

    yield load
    for runner in made:
        runner.close()
    launch.set_num_threads(threads)


class Engine:
    """A core over one runner, for several rounds of requests. Only `proposals` and what drafts propose."""

    def __init__(self, runner: Any, proposals: Proposals | None = None, **settings: Any) -> None:
        speculative = SpeculationConfig(method="auto" if runner.info.drafts else "off")
        config = EngineConfig(model="test", **{"speculative": speculative} | SETTINGS | settings)
        self.core = EngineCore(config, runner, proposals=proposals)
        self._count = 0
        self.num_preemptions = self.num_accepted = 0

    def add(self, prompts: list[list[int]], params: SamplingParams) -> list[str]:
        names = [f"r{self._count + index}" for index in range(len(prompts))]
        self._count += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.core.add(GenerateRequest(request_id=name, model="test", prompt_token_ids=prompt, sampling=params))
        return names

    def run_out(self) -> None:
        while self.core.has_work:
            self.core.step()

    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        """Return the tokens of each choice, and how many log probabilities of its prompt came with them."""
        found: dict[tuple[str, int], tuple[list[int], int]] = {}
        self.add(prompts, params)
        while self.core.has_work:
            for output in self.core.step().outputs:
                assert output.error is None
                self.num_preemptions += output.num_preemptions
                self.num_accepted += output.num_accepted
                tokens, count = found.get((output.request_id, output.choice), ([], 0))
                both = [*tokens, *output.token_ids], count + len(output.prompt_logprobs)
                found[output.request_id, output.choice] = both
        self.core.check_integrity()
        return [found[key] for key in sorted(found, key=lambda key: (int(key[0][1:]), key[1]))]


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 131, (length,), generator=generator).tolist() for length in (1, 5, 33, 90, 17, 33)]


ROUNDS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True, presence_penalty=0.5, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=2),
]


def answers(runner: Any, **settings: Any) -> list[Any]:
    engine = Engine(runner, **settings)
    found = [engine.run(prompts_of(seed), params) for seed, params in enumerate(ROUNDS)]
    return [*found, engine.run(prompts_of(0), ROUNDS[0])]  # hits of the first round's prefixes
