"""A draft model: answers are those without it, and its cache follows the model's through everything that blocks do.

A draft model that equals the model drafts exactly what follows: every rejected token would show a fault of its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from byte_bundle import byte_tokenizer
from hybrid_models import MODELS, write_hybrid
from safetensors.numpy import load_file, save_file
from tiny_llama import write_tiny_llama

from pagemill import LLM, SamplingParams, StructuredOutputsParams
from pagemill_engine.config import EngineConfig
from pagemill_engine.proposing.draft import Rounds
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.sizing.sizing import sizes_here
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.model_files import load_model_spec

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}
FEW = list(range(20, 60))
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    "choices": {"temperature": 0.8, "n": 3, "logprobs": 1},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": {7: 3.0, 9: 4.0}},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": FEW[::9], "allowed_token_ids": FEW},
    "minimum": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": FEW[::3], "allowed_token_ids": FEW},
    "bad words": {"temperature": 0.8, "bad_words": ["the", "a"]},
    "a form": {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "length": {"temperature": 0.0, "max_tokens": 2},
}
PREFIX = "one two three four five six seven "
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "num_kv_blocks": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_threads": 1,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a tokenizer, and others: one that differs a little, one for longer texts, one with other tokens."""
    found = {}
    for name in ("model", "near", "long", "foreign"):
        folder = found[name] = tmp_path_factory.mktemp(name)
        write_tiny_llama(
            folder, vocab_size=257, hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=512 if name == "long" else 256,
        )  # fmt: skip
        content = json.loads(byte_tokenizer([("o", "n")] if name == "foreign" else [("t", "h")]).to_str())
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text("{}")
    found["windows"] = tmp_path_factory.mktemp("windows")
    config = transformers.Gemma3TextConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, sliding_window=20, initializer_range=0.3,
        layer_types=["sliding_attention", "full_attention"] * 2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).save_pretrained(found["windows"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found["windows"] / name).write_text((found["model"] / name).read_text())
    found["hybrid"] = tmp_path_factory.mktemp("hybrid")
    write_hybrid(*MODELS["qwen3.5"], found["hybrid"], 257)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found["hybrid"] / name).write_text((found["model"] / name).read_text())
    weights = load_file(found["near"] / "model.safetensors")
    noise = np.random.default_rng(3)
    for name, stored in weights.items():
        weights[name] = stored + noise.normal(0, 0.03, stored.shape).astype(np.float32)
    save_file(weights, found["near"] / "model.safetensors", {"format": "pt"})
    return found


def make(folders: dict[str, Path], draft: str | None, model: str = "model", **settings: Any) -> LLM:
    """Load a model, which drafts as many tokens as it may, if it has a draft model."""
    config: dict[str, Any] = {"method": "off"}
    if draft is not None:
        config = {"method": "draft_model", "model": str(folders[draft]), "num_speculative_tokens": 4}
    llm = LLM(str(folders[model]), speculative_config=config, **{**SETTINGS, **settings})
    if llm._core._proposals is not None:
        llm._core._proposals._ms_of = None
    return llm


def answers(llm: LLM) -> tuple[list[Any], int, int]:
    """Return what each request got, and the numbers of proposed and of sampled ones among them. The requests share
    the beginning of their prompts, wait for blocks and are preempted; prompts are computed in parts."""
    params = [SamplingParams(**({"max_tokens": 30, "seed": 4} | case)) for case in CASES.values()]
    prompts = [f"{PREFIX}{name}" for name in CASES]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [[(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in out.outputs] for out in outputs]
    metrics = [out.metrics for out in outputs if out.metrics is not None]
    return found, sum(m.num_proposed_tokens for m in metrics), sum(m.num_accepted_tokens for m in metrics)


@pytest.fixture(scope="module", params=[False, True], ids=["plain-loop", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], overlap: bool) -> Iterator[list[Any]]:
    with make(folders, None, overlap=overlap) as llm:
        yield answers(llm)[0]


@pytest.mark.slow
def test_answers_are_those_without(folders: dict[str, Path], overlap: bool, plain: list[Any]) -> None:
    with make(folders, "near", overlap=overlap) as llm:
        for _ in range(2):  # the second time prompts are found in the cache
            found, num_proposed, num_accepted = answers(llm)
            assert found == plain
            assert 0 < num_accepted < num_proposed
        assert llm._core.scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 3])
def test_a_draft_model_that_equals_the_model_is_never_wrong(
    folders: dict[str, Path], overlap: bool, monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    """Wherever its keys and values come from: own steps, other requests, forks, copies, blocks computed again, and
    those of an engine that slept; also if it drafts behind each third step only, and lags between."""
    steps = count()
    monkeypatch.setattr(Rounds, "choose", lambda *_: 0 if next(steps) % period else 4)
    with make(folders, "model", overlap=overlap) as llm:
        for _ in range(2):
            assert drafts_all(llm) > 0
            runner, held = llm._core.runner, 14 * 16 + 6 * 16 // 2
            assert runner.sleep() == held * runner.info.kv_bytes_per_token
            runner.wake()
            llm._core.scheduler.kv.reset_prefix_cache()


def drafts_all(llm: LLM) -> int:
    """Return the cached tokens of requests for which nothing was drafted in vain."""
    params = [
        SamplingParams(temperature=0.8, seed=seed, n=1 + seed % 3, max_tokens=36, ignore_eos=True) for seed in range(8)
    ]
    before = llm._core.scheduler.num_preemptions
    outputs = llm.generate([f"{PREFIX}{n % 3}" for n in range(8)], params, use_tqdm=False)
    metrics = [out.metrics for out in outputs if out.metrics is not None]
    num_proposed = sum(each.num_proposed_tokens for each in metrics)
    assert num_proposed == sum(each.num_accepted_tokens for each in metrics) > 60
    assert llm._core.scheduler.num_preemptions > before
    return sum(out.num_cached_tokens or 0 for out in outputs)


def test_what_was_answered_without_drafts_can_be_followed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model has computed each block that is cached, though it lagged while nothing was drafted."""
    monkeypatch.setattr(Rounds, "choose", lambda *_: 0)
    with make(folders, "model") as llm:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
        (first,) = llm.generate([PREFIX], params, use_tqdm=False)
        monkeypatch.setattr(Rounds, "choose", lambda *_: 4)
        text = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        (second,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
    assert first.metrics is not None
    assert second.metrics is not None
    assert first.metrics.num_proposed_tokens == 0
    assert second.num_cached_tokens >= len(text) - 16 > len(first.prompt_token_ids) + 16
    assert second.metrics.num_accepted_tokens == second.metrics.num_proposed_tokens > 30


def test_a_model_with_windows_has_one_too(folders: dict[str, Path]) -> None:
    """Its draft model keeps everything, in the blocks of the kind that does, and frees nothing behind a window."""
    settings: dict[str, Any] = {"model": "windows", "max_model_len": 200, "num_kv_blocks": 40}
    params = [SamplingParams(temperature=0.8, seed=n, n=1 + n % 3, max_tokens=60, ignore_eos=True) for n in range(6)]
    prompts, answered = [f"{PREFIX}{n % 3}" for n in range(6)], []
    for draft in (None, "windows"):
        with make(folders, draft, **settings) as llm:
            assert [kind.name for kind in llm._core.scheduler.kv.kinds] == ["full", "window-20"]
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
        answered.append([[choice.token_ids for choice in out.outputs] for out in outputs])
    assert answered[0] == answered[1]
    metrics = [out.metrics for out in outputs if out.metrics is not None]
    num_proposed = sum(each.num_proposed_tokens for each in metrics)
    assert sum(each.num_accepted_tokens for each in metrics) == num_proposed > 100


@pytest.mark.slow
def test_a_hybrid_has_one_too(folders: dict[str, Path]) -> None:
    """Which is no hybrid itself: its blocks follow where the hybrid forks and resumes, behind its states."""
    params = [SamplingParams(temperature=0.8, seed=n, n=1 + n % 3, max_tokens=60, ignore_eos=True) for n in range(6)]
    prompts, answered = [f"{PREFIX}{n % 3}" for n in range(6)], []
    for draft in (None, "model"):
        with make(folders, draft, model="hybrid", max_model_len=200, num_kv_blocks=64) as llm:
            assert [kind.name for kind in llm._core.scheduler.kv.kinds] == ["full", "state"]
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            assert any(out.num_cached_tokens for out in outputs)
        answered.append([[choice.token_ids for choice in out.outputs] for out in outputs])
    assert answered[0] == answered[1]
    assert sum(out.metrics.num_proposed_tokens for out in outputs if out.metrics is not None) > 100


@pytest.mark.parametrize("on_torch", [[True, False], [False, True]], ids=["the-model", "the-draft"])
def test_either_model_may_run_on_torch(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, on_torch: list[bool]
) -> None:
    left = list(on_torch)
    monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: not left.pop(0))
    with make(folders, "model", deterministic=False) as llm:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True)
        outputs = llm.generate([PREFIX, "x"], params, use_tqdm=False)
    assert not left
    for out in outputs:
        assert out.metrics is not None
        assert out.metrics.num_accepted_tokens > 0.8 * out.metrics.num_proposed_tokens > 10


def test_its_memory_is_part_of_the_plan(folders: dict[str, Path], runner_loader: Callable[..., Any]) -> None:
    config = EngineConfig(model=str(folders["model"]), dtype="float32", num_threads=1, max_model_len=128)
    drafting = SpeculationConfig(method="draft", source=str(folders["near"]))
    spec = load_model_spec(folders["model"])
    alone = sizes_here(config, folders["model"], spec)
    both = sizes_here(
        EngineConfig(model=config.model, dtype="float32", max_model_len=128, speculative=drafting),
        folders["model"],
        spec,
    )
    assert both.weight_bytes == 2 * alone.weight_bytes
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert both.draft_step_bytes > 64 * 16 * alone.kv_bytes_per_token
    settings = {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 20, "max_model_len": 128}
    infos = []
    for speculative in (SpeculationConfig(method="off"), drafting):
        runner = runner_loader(folders["model"], speculative=speculative, **settings)
        infos.append(runner.info)
        runner.close()
    assert infos[1].num_blocks == infos[0].num_blocks // 2
    assert infos[1].weight_bytes == 2 * infos[0].weight_bytes
    assert infos[1].memory.kv_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("draft", "settings", "message"),
    [
        ("foreign", {}, "the tokenizer of `.*foreign.*` differs"),
        (
            "near",
            {"model": "long", "max_model_len": 300, "num_kv_blocks": 30},
            "was made for 256 tokens, but requests may have 300",
        ),
        ("hybrid", {}, "`.*hybrid.*` keeps recurrent states"),
        ("near", {"max_num_batched_tokens": 4, "max_num_seqs": 4}, "num_tokens is 4, but a step has 4 tokens"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    folders: dict[str, Path], draft: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        make(folders, draft, **settings)
    assert caught.value.reason == "SettingsUnsupported"
