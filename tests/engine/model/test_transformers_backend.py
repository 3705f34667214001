"""Decoders without a declared family run by their transformers classes with the paged cache.

Their greedy answers equal `generate()` in any batch; models with other state are refused before they are served.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagemill_engine.config import EngineConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.errors import LoadError
from pagemill_models.declaration.errors import UnsupportedModelArchitecture
from pagemill_models.declaration.known import known_architectures
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.source_errors import SourceError

NUM_TOKENS = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "HeliumForCausalLM": {},
    "ArceeForCausalLM": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Dots1ForCausalLM": {
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "FlexOlmoForCausalLM": {"num_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True},
    "PhimoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeSharedForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PROMPTS: list[list[int]] = [[3 + 7 * at % 190 for at in range(length)] for length in (1, 2, 16, 33, 90)]


def write(folder: Path, name: str, **overrides: Any) -> Any:
    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**SHAPE | overrides)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0 if parameter_name.endswith("bias") else 1, 0.2)
    model.save_pretrained(folder)
    return model


def generated(model: Any) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, eos_token_id=None,
        )  # fmt: skip
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.sample("*-HeliumForCausalLM", "cpu-FlexOlmoForCausalLM", "cpu_native-Dots1ForCausalLM")
@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_those_of_generate(
    name: str, tmp_path: Path, backend: str, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    assert name not in known_architectures()
    expected = generated(write(tmp_path, name, **MODELS[name]))
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    runner = runner_loader(tmp_path, backend=backend)
    driver = make_driver(runner)
    for settings in ({}, {"waves": True}, {"max_num_batched_tokens": 7}, {"num_blocks": 16}):
        results = driver.greedy(PROMPTS, NUM_TOKENS, **settings)
        assert [result.token_ids for result in results] == expected
    again = driver.greedy(PROMPTS * 2, NUM_TOKENS, waves=True)
    assert [result.token_ids for result in again] == expected * 2
    assert sum(result.num_cached_tokens for result in again) > 0


def test_the_backend_is_logged_and_its_memory_counted(tmp_path: Path) -> None:
    model = write(tmp_path, "HeliumForCausalLM")
    progress: list[str] = []
    settings = EngineConfig(model=str(tmp_path), dtype="float32", num_kv_blocks=32, max_model_len=64)
    runner = create_runner(settings, lambda phase, detail: progress.append(detail))
    runner.close()
    said = f"the classes of transformers {transformers.__version__}, slower than a family of our own"
    assert said in progress[0]
    assert said in runner.info.compute
    assert runner.info.weight_bytes == sum(each.nbytes for each in model.parameters())


def test_a_planted_fault_in_the_order_of_heads_is_detected(
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pagemill_execution.decoders.by_transformers import attention

    expected = generated(write(tmp_path, "HeliumForCausalLM"))
    attend = attention.attend

    def swapped(module: Any, query: Any, key: Any, *rest: Any, **more: Any) -> Any:
        return attend(module, query, key.flip(1), *rest, **more)

    monkeypatch.setattr(attention, "attend", swapped)
    results = make_driver(runner_loader(tmp_path)).greedy(PROMPTS, NUM_TOKENS)
    assert [result.token_ids for result in results] != expected


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("Dots1ForCausalLM", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3}, "`sliding_attention`"),
        ("MambaForCausalLM", {}, "`MambaForCausalLM`, which is not supported"),
        ("JambaForCausalLM", {"num_experts": 2}, "`JambaForCausalLM`"),
        ("HeliumForCausalLM", {"rope_scaling": LONG}, "`longrope`"),
        ("MiniCPM3ForCausalLM", {"kv_lora_rank": 16}, "`kv_lora_rank`"),
    ],
)
def test_models_with_other_state_than_keys_and_values_are_refused_by_their_header(
    name: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config_class = getattr(transformers, name).config_class
    own = {"vocab_size": 203, "hidden_size": 64} if name == "MambaForCausalLM" else SHAPE
    config = {**config_class(**own, **overrides).to_dict(), "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelArchitecture, match=message):
        load_model_spec(tmp_path)


def test_unsupported_arguments_of_attention_are_refused_before_ready(
    tmp_path: Path, runner_loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill_execution.decoders.by_transformers import attention

    monkeypatch.setattr(attention, "WITHOUT_EFFECT", ("is_causal",))
    write(tmp_path, "HeliumForCausalLM")
    with pytest.raises(LoadError, match=r"no family of Pagemill's.*its attention asks for .*dropout"):
        runner_loader(tmp_path)


def test_a_class_that_fails_at_the_first_token_is_refused_before_ready(
    tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write(tmp_path, "VaultGemmaForCausalLM", sliding_window=None, layer_types=["full_attention"] * 3)
    with pytest.raises(LoadError, match="does not compute a first token"):
        runner_loader(tmp_path)


@pytest.mark.parametrize(
    "key", ["intermediate_size", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias", "dtype"]
)
def test_a_key_that_only_the_class_reads_may_have_any_value(
    key: str, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write(tmp_path, "HeliumForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    for value in (None, "x", "x" * 70_000, -1, 0, 2**24, 2**31, 2**63, 0.5, [], [1], {"rope_type": "x"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        refused = ""
        began_s = time.thread_time()
        try:
            runner_loader(tmp_path)
        except (LoadError, SourceError) as error:
            refused = str(error)
        assert len(refused) < 1000, value
        assert time.thread_time() - began_s < 5.0, value
        if (key, value) == ("intermediate_size", 2**24):
            assert "parameters by its config.json" in refused


@pytest.mark.parametrize(("setting", "value"), [("quantization", "int8"), ("deterministic", True)])
def test_settings_that_the_backend_does_not_support_are_refused(
    setting: str, value: Any, tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    write(tmp_path, "HeliumForCausalLM")
    with pytest.raises(LoadError, match=f"`{setting}` {value} is not supported"):
        runner_loader(tmp_path, **{setting: value})


@pytest.mark.parametrize("model_type", ["unheard_of", "../../etc", "Helium", None])
def test_an_architecture_that_transformers_does_not_have_is_refused_with_the_list(
    model_type: str | None, tmp_path: Path
) -> None:
    config = {**SHAPE, "architectures": ["StrangeForCausalLM"], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelArchitecture, match="Supported: Aquila"):
        load_model_spec(tmp_path)
