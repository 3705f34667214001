"""Adapters beside recurrent layers: greedy answers equal those of PEFT's model, and states are an adapter's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_engine import NUM_TOKENS, Engine
from hybrid_models import ALL, VARIANTS, write_hybrid
from peft_adapters import ATTENTION, Adapted, Base, write_adapter

from pagemill_engine.scheduler.admission import Admission

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "qwen3.5",
        {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION, "down_proj"]},
    ),
    "qwen3.5-moe": (
        "qwen3.5-moe",
        {"target_modules": ["in_proj_qkv", "in_proj_b"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "qwen3-next": ("qwen3-next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION]}),
    "qwen3-next, all-linear": ("qwen3-next", {"target_modules": "all-linear"}),
    "bamba": ("bamba", {"target_modules": "all-linear"}),
    "falcon-h1": ("falcon-h1", {"target_modules": ["in_proj", "q_proj", "o_proj", "up_proj"]}),
    "granitemoehybrid": ("granitemoehybrid", {"target_modules": ["in_proj", "out_proj", *ATTENTION]}),
    "lfm2-moe": ("lfm2-moe", {"target_modules": ["in_proj", "out_proj", "q_proj", "w2"]}),
    "lfm3": ("lfm3", {"target_modules": ["in_proj", "g_proj", "q_proj", "w1"]}),
    "olmo-hybrid": ("olmo-hybrid", {"target_modules": "all-linear"}),
    "nemotron-h": ("nemotron-h", {"target_modules": ["in_proj", "k_proj", "up_proj", "down_proj"]}),
    "nemotron-h, latents": (
        "nemotron-h with experts over latents",
        {"target_modules": ["fc1_latent_proj", "fc2_latent_proj", "up_proj", "down_proj"]},
    ),
    "kimi-linear": (
        "kimi-linear",
        {"target_modules": [*ATTENTION, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "kv_b_proj"]},
    ),
    "lfm2": ("lfm2", {"target_modules": ["in_proj", "out_proj", "w2", "q_proj"]}),
}
PROMPTS = [[(7 * index + 11 * position * position) % 90 for position in range(20 + index)] for index in range(6)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Base] = {}

    def base(name: str) -> Base:
        if name not in made:
            folder = tmp_path_factory.mktemp("base")
            made[name] = Base(folder, write_hybrid(*(ALL | VARIANTS)[name], folder))
        return made[name]

    return base


@pytest.mark.sample("qwen3-next", "kimi-linear")
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_on_hybrids_equal_pefts(case: str, bases: Any, tmp_path: Path) -> None:
    base, settings = bases(CASES[case][0]), CASES[case][1]
    models = [write_adapter(base, tmp_path / str(seed), seed, **settings) for seed in (1, 2)]
    engine = Engine(base.folder)
    digests = ["", *(engine.load(each.folder) for each in models)]
    references = [Adapted(base.folder, base.model), *models] * 2
    expected = [model.greedy(prompt, NUM_TOKENS) for model, prompt in zip(references, PROMPTS, strict=True)]
    assert min(gap for _, gap in expected) > 1e-3, "near ties do not show what is wrong"
    assert engine.greedy(PROMPTS, digests * 2) == [tokens for tokens, _ in expected]


@pytest.mark.full
def test_adapters_on_a_device_give_the_answers_of_the_cpu(bases: Any, tmp_path: Path) -> None:
    base, settings = bases("qwen3.5"), CASES["qwen3.5"][1]
    folders = [write_adapter(base, tmp_path / str(seed), seed, **settings).folder for seed in (1, 2)]
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(base.folder, device=device, num_kv_blocks=48, max_model_len=48, max_num_seqs=4)
        digests = ["", *(engine.load(folder) for folder in folders)]
        answers.append(engine.greedy(PROMPTS[:3], digests, 3))
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 3


@pytest.mark.parametrize("is_faulty", [False, True], ids=["", "all adapters share states"])
def test_states_are_those_of_one_adapter(
    is_faulty: bool, bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_faulty:
        root = Admission._compute_cache_root
        monkeypatch.setattr(Admission, "_compute_cache_root", lambda self, salt, digest: root(self, salt, ""))
    base, settings = bases("lfm2"), CASES["lfm2"][1]
    folders = [write_adapter(base, tmp_path / str(seed), seed, **settings).folder for seed in (1, 2)]
    fresh, engine = Engine(base.folder, enable_prefix_caching=False), Engine(base.folder)
    digests = ["", *(engine.load(folder) for folder in folders)]
    assert [fresh.load(folder) for folder in folders] == digests[1:]
    prompt = PROMPTS[0] * 4
    expected = [fresh.greedy([prompt], [digest]) for digest in digests]
    answers = [engine.greedy([prompt], [digest]) for digest in digests * 2]
    assert (answers == expected * 2) is not is_faulty
