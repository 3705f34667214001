"""Families of other kinds than Llama's: greedy answers equal to Hugging Face transformers on tiny random models, alone,
in batches and in chunks, on every backend of the CPU. Planted faults must break it.

What is unlike Llama in each: GPT-2 learned positions, Conv1D matrices and a tied head; BLOOM ALiBi and a norm behind
the embedding; GPT-NeoX partial rotary embedding and parallel blocks; GPT-J interleaved rotary embedding; Phi-3 fused
matrices and a partial rotary embedding; Gemma 2 soft caps, windows in every second layer and norms behind its blocks;
OPT positions with an offset; Falcon one key and value head; Gemma 3 two rotary embeddings. Variants, and families that
differ in less, run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagemill_engine.loading.errors import LoadError
from pagemill_kernels.cpu import library

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
NUM_TOKENS = 24
VOCAB_SIZE = 203
LENGTHS = (1, 2, 15, 16, 17, 33, 90, 200)
CHUNKS = (1, 7, 16)
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4}
NEOX = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 256, "rotary_dim": 16}
GEMMA2 = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 12.0,
}
LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
ODD = {**LLAMA, "num_key_value_heads": 1, "head_dim": 24}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
MPT = {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}
BIGCODE = {**GPT2, "tie_word_embeddings": False}
GEMMA3 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
}
GRANITE = {
    **LLAMA,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bloom": ("BloomForCausalLM", BLOOM),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "opt": ("OPTForCausalLM", OPT),
    "falcon": ("FalconForCausalLM", FALCON),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 untied, relu, other scale": (
        "GPT2LMHeadModel",
        {
            **GPT2,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 96,
        },
    ),
    "bloom with six heads": ("BloomForCausalLM", {**BLOOM, "hidden_size": 96, "n_head": 6}),
    "gpt-neox one after another": (
        "GPTNeoXForCausalLM",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "gptj all of a head": ("GPTJForCausalLM", {**GPTJ, "rotary_dim": 32}),
    "gemma2 without caps": (
        "Gemma2ForCausalLM",
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "opt with norms behind its blocks, and projections": (
        "OPTForCausalLM",
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48},
    ),
    "opt without biases, gelu": ("OPTForCausalLM", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "falcon with grouped queries and two norms": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon with grouped queries and one norm": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon with alibi, one after another": (
        "FalconForCausalLM",
        {
            **FALCON,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mpt": ("MptForCausalLM", {**MPT, "tie_word_embeddings": False}),
    "mpt with six heads": ("MptForCausalLM", {**MPT, "d_model": 96, "n_heads": 6, "tie_word_embeddings": False}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", BIGCODE),
    "gpt-bigcode with all heads": ("GPTBigCodeForCausalLM", {**BIGCODE, "multi_query": False}),
    "gemma": ("GemmaForCausalLM", {**LLAMA, "head_dim": 32}),
    "gemma3 with a cap and scaling": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "final_logit_softcapping": 12.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20_000.0},
            },
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": False},
    ),
    "smollm3 with a window": (
        "SmolLM3ForCausalLM",
        {
            **LLAMA,
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "granite": ("GraniteForCausalLM", GRANITE),
    "granite with biases": ("GraniteForCausalLM", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "sliding_window": 24}),
    "stablelm": ("StableLmForCausalLM", {**LLAMA, "use_qkv_bias": True}),
    "stablelm side by side": ("StableLmForCausalLM", {**LLAMA, "use_parallel_residual": True}),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "cohere": ("CohereForCausalLM", {**LLAMA, "logit_scale": 1.5}),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "phi3 with long contexts": (
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "pad_token_id": 0,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 300,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.2 * index for index in range(8)],
                "long_factor": [3.0] * 8,
            },
        },
    ),
}
ODD_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt with large projections": ("OPTForCausalLM", {**OPT, "num_attention_heads": 2, "word_embed_proj_dim": 96}),
    "falcon one after another": ("FalconForCausalLM", {**FALCON, "parallel_attn": False, "ffn_hidden_size": 100}),
    "falcon with one shared head": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1, "bias": True},
    ),
    "falcon with six heads and alibi": (
        "FalconForCausalLM",
        {**FALCON, "hidden_size": 96, "num_attention_heads": 6, "alibi": True},
    ),
    "gpt-bigcode tied": ("GPTBigCodeForCausalLM", {**GPT2, "n_inner": 100}),
    "gemma": ("GemmaForCausalLM", ODD),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA2, "num_key_value_heads": 1, "head_dim": 24}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA3, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    "smollm3": ("SmolLM3ForCausalLM", {**ODD, "pad_token_id": 0, "no_rope_layers": [0, 1, 0], "mlp_bias": True}),
    "olmo2": ("Olmo2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    "granite": ("GraniteForCausalLM", {**GRANITE, "num_key_value_heads": 1}),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "use_bias": False}),
    "stablelm": ("StableLmForCausalLM", {**LLAMA, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 1, "partial_rotary_factor": 1.0}),
    "nemotron": ("NemotronForCausalLM", {**ODD, "partial_rotary_factor": 0.25, "mlp_bias": True}),
    "phi3": (
        "Phi3ForCausalLM",
        {**LLAMA, "num_key_value_heads": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5, "sliding_window": 24},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {**NEOX, "rotary_pct": 1.0, "tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", {**ODD, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**ODD, "sliding_window": 20}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**ODD, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", ODD),
}
"""One key and value head, head sizes that no native kernel has, all or little of a head rotated, short windows."""


@dataclass
class Family:
    folder: Path
    reference: Any
    prompts: list[list[int]]
    expected: list[list[int]]
    """Greedy continuations by transformers."""
    median_gap: float
    """Between the log probabilities of the two best tokens."""


def write_model(name: str, overrides: dict[str, Any], folder: Path) -> Any:
    model_class = getattr(transformers, name)
    config = model_class.config_class(vocab_size=VOCAB_SIZE, initializer_range=0.3, **overrides)
    # The fused attention of torch has no soft caps; Falcon's own formula adds ALiBi's part twice.
    config._attn_implementation = "sdpa" if name.startswith("Falcon") else "eager"
    torch.manual_seed(1)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 1:
                parameter.normal_(0 if name.startswith("Gemma") else 1, 0.2)
        if not config.tie_word_embeddings:
            model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def greedy_reference(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The continuation and all gaps; the whole sequence is computed anew for each token, without any cache."""
    sequence, gaps = torch.tensor([prompt]), []
    for _ in range(NUM_TOKENS):
        best = model(sequence, use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        sequence = torch.cat((sequence, best.indices[None, :1]), dim=-1)
    return sequence[0, len(prompt) :].tolist(), gaps


def make_family(name: str, overrides: dict[str, Any], folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Family:
    model = write_model(name, overrides, folder)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    answers = [greedy_reference(model, prompt) for prompt in prompts]
    gaps = torch.tensor([gap for _, each in answers for gap in each])
    return Family(folder, model, prompts, [tokens for tokens, _ in answers], float(gaps.median()))


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(*MODELS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """By name, for tests of one of them."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            lengths = LENGTHS if name in MODELS else LENGTHS[:-1]
            made[name] = make_family(*(MODELS | VARIANTS)[name], tmp_path_factory.mktemp("family"), lengths)
        return made[name]

    return get


@pytest.fixture(scope="module", params=["cpu_native", "cpu", "reference"])
def any_backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu_native" and library.load() is None:
        pytest.skip(f"no native kernels: {library.why_absent()}")
    return str(request.param)


@pytest.fixture(scope="module")
def driver(family: Family, any_backend: str, runner_loader: Loader, make_driver: Drivers) -> Any:
    return make_driver(runner_loader(family.folder, backend=any_backend))


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_the_best_tokens_are_clearly_apart(family: Family) -> None:
    assert family.median_gap > 0.5


def test_one_prompt_at_a_time_equals_transformers(family: Family, driver: Any) -> None:
    assert tokens_of(driver.greedy(family.prompts, NUM_TOKENS, waves=True)) == family.expected


def test_a_batch_equals_transformers(family: Family, driver: Any) -> None:
    results = driver.greedy(family.prompts * 3, NUM_TOKENS, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected * 3


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunk_size_equals_transformers(family: Family, driver: Any, chunk: int) -> None:
    prompts = family.prompts if chunk == max(CHUNKS) else family.prompts[:-1]
    results = driver.greedy(prompts, NUM_TOKENS, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert tokens_of(results) == family.expected[: len(prompts)]


def test_prefix_hits_and_preemption_change_nothing(family: Family, driver: Any) -> None:
    hit = driver.greedy(family.prompts * 2, NUM_TOKENS, waves=True)
    assert tokens_of(hit) == family.expected * 2
    assert sum(result.num_cached_tokens for result in hit[len(family.prompts) :]) >= 16 + 32 + 80 + 192
    preempted = driver.greedy(family.prompts, NUM_TOKENS, num_blocks=16, enable_prefix_caching=False)
    assert tokens_of(preempted) == family.expected
    assert sum(result.num_preemptions for result in preempted) > 0


def test_log_probabilities_equal_transformers(family: Family, driver: Any) -> None:
    prompt, expected = family.prompts[-1], family.expected[-1]
    with torch.no_grad():
        logits = family.reference(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
    reference = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None]).squeeze(1)
    ours = torch.tensor(driver.greedy([prompt], NUM_TOKENS)[0].logprobs)
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(
    name: str, families: Callable[[str], Family], runner_loader: Loader, make_driver: Drivers
) -> None:
    variant = families(name)
    assert variant.median_gap > 0.5
    for backend in ("cpu_native", "cpu") if library.load() else ("cpu",):
        results = make_driver(runner_loader(variant.folder, backend=backend)).greedy(variant.prompts, NUM_TOKENS)
        assert tokens_of(results) == variant.expected


@pytest.mark.full
@pytest.mark.parametrize("name", ODD_SHAPES)
def test_odd_shapes_equal_transformers(name: str, tmp_path: Path, runner_loader: Loader, make_driver: Drivers) -> None:
    """On the backend that the engine takes for the shape."""
    odd = make_family(*ODD_SHAPES[name], tmp_path)
    driver = make_driver(runner_loader(tmp_path))
    for settings in ({"max_num_batched_tokens": 29}, {"num_blocks": 16, "enable_prefix_caching": False}):
        results = driver.greedy(odd.prompts, NUM_TOKENS, **settings)
        assert tokens_of(results) == odd.expected


def test_gemma_3_that_looks_ahead_is_refused(tmp_path: Path, runner_loader: Loader) -> None:
    write_model("Gemma3ForCausalLM", {**GEMMA3, "use_bidirectional_attention": True}, tmp_path)
    with pytest.raises(LoadError, match="`use_bidirectional_attention`"):
        runner_loader(tmp_path)
