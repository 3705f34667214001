"""Greedy answers with adapters equal those of PEFT's model, alone and in batches of many adapters and the base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from peft_adapters import VOCAB_SIZE, Adapted, Base, write_adapter, write_base

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

NUM_TOKENS = 6
PROMPTS = [[(7 * index + 11 * position * position) % VOCAB_SIZE for position in range(12)] for index in range(32)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "llama, all-linear and rslora": ("llama", {"target_modules": "all-linear", "use_rslora": True, "r": 4, "lora_alpha": 4}),
    "llama, patterns": (
        "llama",
        {
            "target_modules": r".*\.(q_proj|down_proj|up_proj)",
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 4, "down_proj": 16},
            "alpha_pattern": {"up_proj": 4},
        },
    ),
    "llama, some layers": ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]}),
    "llama, embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "llama, tied head": ("llama tied", {"target_modules": ["embed_tokens", "k_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, embedding": ("gpt2", {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gpt_neox": ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}),
    "mixtral": (
        "mixtral",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
    ),
    "qwen3_moe, one parameter": (
        "qwen3_moe", {"target_modules": ["k_proj"], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
    ),
}  # fmt: skip


class Engine:
    def __init__(self, base: Base, **settings: Any) -> None:
        values: dict[str, Any] = {
            "model": str(base.folder), "dtype": "float32", "num_kv_blocks": 512, "enable_lora": True, "max_loras": 8,
            "max_lora_rank": 16, "max_num_seqs": 32, **settings,
        }  # fmt: skip
        config = EngineConfig(**values)
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        self._count = 0

    def load(self, adapted: Adapted) -> str:
        assert self.core.adapters is not None
        return self.core.adapters.load(adapted.folder).digest

    def greedy(
        self, prompts: Sequence[list[int]], digests: Sequence[str], num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for prompt, digest in zip(prompts, digests, strict=True):
            name = f"request-{self._count}"
            self._count += 1
            answers[name] = []
            self.core.add(
                GenerateRequest(
                    request_id=name, model="m", prompt_token_ids=prompt, adapter_digest=digest,
                    sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
                )
            )  # fmt: skip
        while self.core.has_work:
            for out in self.core.step().outputs:
                assert out.error is None, out.error
                answers[out.request_id] += out.token_ids
        return list(answers.values())


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: dict[str, Base] = {}

    def base(name: str) -> Base:
        if name not in made:
            made[name] = write_base(name, tmp_path_factory.mktemp("base"))
        return made[name]

    yield base


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_equal_pefts(case: str, bases: Any, tmp_path: Path) -> None:
    name, settings = CASES[case]
    base = bases(name)
    adapted = write_adapter(base, tmp_path, **settings)
    engine = Engine(base)
    digest = engine.load(adapted)
    plain = Adapted(base.folder, base.model)
    expected = [adapted.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    unadapted = [plain.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in unadapted]
    for prompt, (tokens, gap) in zip(PROMPTS, expected, strict=False):
        assert gap > 1e-3, "near ties do not show what is wrong"
        assert engine.greedy([prompt], [digest]) == [tokens]
    assert engine.greedy(PROMPTS[:3], [""] * 3) == [tokens for tokens, _ in unadapted]
