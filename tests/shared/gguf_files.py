"""Small models of families whose GGUF files are compared with their folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from expert_models import DEEPSEEK_V2, LATENT
from expert_models import NEW as SPARSE
from expert_models import VARIANTS as WITH_EXPERTS
from family_models import FALCON, GPT2, LLAMA, MODELS, NEW, VARIANTS
from hybrid_models import EXPERTS, KIMI, LFM2, LFM2_MOE, NEMOTRON, OTHERS, QWEN, SHORT, STATE_SPACES
from hybrid_models import MODELS as HYBRIDS

PROMPTS: list[list[int]] = [[3 + 7 * at % 190 for at in range(length)] for length in (1, 5, 40)]
FALCON_GROUPED = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
OLMOE = {**LLAMA, "num_experts": 5, "num_experts_per_tok": 2}
WITHOUT_WINDOWS = {**LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * LLAMA["num_hidden_layers"]}
SAME_MAGNITUDE = {"rope_parameters": {**LATENT["rope_parameters"], "mscale": 1.2}}
FILES: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": ("gpt2", ("GPT2LMHeadModel", GPT2)),
    "starcoder": ("starcoder", VARIANTS["gpt-bigcode"]),
    "bloom": ("bloom", MODELS["bloom"]),
    "bloom with six heads": ("bloom", VARIANTS["bloom with six heads"]),
    "gptneox": ("gptneox", MODELS["gpt-neox"]),
    "gptneox one after another": (
        "gptneox",
        ("GPTNeoXForCausalLM", {**MODELS["gpt-neox"][1], "use_parallel_residual": False, "attention_bias": False}),
    ),
    "gptj": ("gptj", MODELS["gptj"]),
    "falcon 7b": ("falcon", MODELS["falcon"]),
    "falcon 40b": ("falcon", ("FalconForCausalLM", FALCON_GROUPED)),
    "falcon 11b": ("falcon", ("FalconForCausalLM", {**FALCON_GROUPED, "num_ln_in_parallel_attn": 1})),
    "mpt": ("mpt", VARIANTS["mpt with six heads"]),
    "mpt with clipped values": ("mpt", VARIANTS["mpt with clipped values"]),
    "gemma": ("gemma", VARIANTS["gemma"]),
    "gemma2": ("gemma2", MODELS["gemma2"]),
    "gemma3": ("gemma3", VARIANTS["gemma3 with a cap and scaling"]),
    "phi2": ("phi2", VARIANTS["phi"]),
    "phi3": ("phi3", ("Phi3ForCausalLM", {**LLAMA, "pad_token_id": 0, "sliding_window": 24})),
    "phi3 with a partial rotation": (
        "phi3",
        ("Phi3ForCausalLM", {**LLAMA, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    ),
    "phi3 with long contexts": ("phi3", VARIANTS["phi3 with long contexts"]),
    "olmo2": ("olmo2", VARIANTS["olmo2"]),
    "olmoe": ("olmoe", ("OlmoeForCausalLM", OLMOE)),
    "granite": ("granite", VARIANTS["granite"]),
    "granite with biases": ("granite", VARIANTS["granite with biases"]),
    "smollm3": ("smollm3", VARIANTS["smollm3"]),
    "starcoder2": ("starcoder2", ("Starcoder2ForCausalLM", LLAMA)),
    "stablelm": ("stablelm", VARIANTS["stablelm"]),
    "stablelm side by side": ("stablelm", VARIANTS["stablelm side by side"]),
    "stablelm with norms of heads": ("stablelm", VARIANTS["stablelm with norms of heads"]),
    "cohere2": ("cohere2", NEW["cohere2"]),
    "ernie4_5": ("ernie4_5", NEW["ernie4_5"]),
    "exaone4": ("exaone4", NEW["exaone4"]),
    "exaone4 without windows": ("exaone4", ("Exaone4ForCausalLM", WITHOUT_WINDOWS)),
    "glm4": ("glm4", NEW["glm4"]),
    "hunyuan-dense": ("hunyuan-dense", NEW["hunyuan_v1_dense"]),
    "seed_oss": ("seed_oss", NEW["seed_oss"]),
    "command-r": ("command-r", VARIANTS["cohere"]),
    "command-r with norms of heads": ("command-r", VARIANTS["cohere with norms of heads"]),
    "nemotron": ("nemotron", VARIANTS["nemotron"]),
    "olmo2, a window (OLMo 3)": ("olmo2", NEW["olmo3"]),
    "mistral3": ("mistral3", NEW["ministral3"]),
    "ernie4_5-moe": ("ernie4_5-moe", SPARSE["ernie4_5_moe"]),
    "gemma4": ("gemma4", NEW["gemma4"]),
    "gemma4 of one kind of value": ("gemma4", VARIANTS["gemma4 of one kind of value"]),
    "gemma4 with experts": ("gemma4", WITH_EXPERTS["gemma4 with experts"]),
    "glm4moe": ("glm4moe", SPARSE["glm4_moe"]),
    "hunyuan-moe": ("hunyuan-moe", SPARSE["hunyuan_v1_moe"]),
    "minimax-m2": ("minimax-m2", SPARSE["minimax_m2"]),
    "mistral4": ("mistral4", SPARSE["mistral4"]),
    "deepseek2, GLM-4.7-Flash": (
        "deepseek2",
        ("Glm4MoeLiteForCausalLM", {**SPARSE["glm4_moe_lite"][1], **SAME_MAGNITUDE}),
    ),
    "lfm2": ("lfm2", SHORT["lfm2"]),
    "lfm2 with another pattern": (
        "lfm2",
        ("Lfm2ForCausalLM", {**LFM2, "full_attn_idxs": [0, 2], "conv_L_cache": 4, "tie_word_embeddings": False}),
    ),
    "lfm2moe": ("lfm2moe", ("Lfm2MoeForCausalLM", {**LFM2_MOE, "tie_word_embeddings": True})),
    "deepseek2, V3": ("deepseek2", ("DeepseekV3ForCausalLM", LATENT | SAME_MAGNITUDE)),
    "deepseek2, V2": ("deepseek2", ("DeepseekV2ForCausalLM", DEEPSEEK_V2 | SAME_MAGNITUDE)),
    "deepseek2, V2-Lite": (
        "deepseek2",
        (
            "DeepseekV2ForCausalLM",
            {**LATENT, "topk_method": "greedy", "q_lora_rank": None, "rope_parameters": {"rope_theta": 5000.0}},
        ),
    ),
}
ONE_RULE_IN_TWO = {**QWEN, "full_attention_interval": 2}
HYBRID_FILES: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "qwen35": ("qwen35", HYBRIDS["qwen3.5"]),
    "qwen35 with as many key heads, tied": (
        "qwen35",
        (
            "Qwen3_5ForCausalLM",
            {**ONE_RULE_IN_TWO, "linear_num_key_heads": 6, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
        ),
    ),
    "qwen35 with one key head, biases": (
        "qwen35",
        ("Qwen3_5ForCausalLM", {**QWEN, "linear_num_key_heads": 1, "attention_bias": True}),
    ),
    "qwen35moe": ("qwen35moe", HYBRIDS["qwen3.5-moe"]),
    "qwen3next": ("qwen3next", ("Qwen3NextForCausalLM", {**QWEN, **EXPERTS})),
    "granitehybrid": ("granitehybrid", STATE_SPACES["granitemoehybrid"]),
    "granitehybrid without experts": (
        "granitehybrid",
        ("GraniteMoeHybridForCausalLM", {**STATE_SPACES["granitemoehybrid"][1], "num_local_experts": 0}),
    ),
    "bamba": ("granitehybrid", STATE_SPACES["bamba"]),
    "falcon-h1": ("falcon-h1", STATE_SPACES["falcon-h1"]),
    "falcon-h1 with norms by group, a kernel of two": (
        "falcon-h1",
        (
            "FalconH1ForCausalLM",
            {
                **STATE_SPACES["falcon-h1"][1],
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "mamba_d_conv": 2,
            },
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        ("NemotronHForCausalLM", {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        (
            "NemotronHForCausalLM",
            {**NEMOTRON, "n_group": 3, "topk_group": 2, "layers_block_type": ["moe", "mamba", "attention", "mamba"]},
        ),
    ),
    "nemotron_h_moe, experts over latents": (
        "nemotron_h_moe",
        (
            "NemotronHForCausalLM",
            {**NEMOTRON, "moe_latent_size": 20, "layers_block_type": ["moe", "mamba", "attention", "moe"]},
        ),
    ),
    "kimi-linear": ("kimi-linear", OTHERS["kimi-linear"]),
    "kimi-linear with compressed queries, two shared experts": (
        "kimi-linear",
        ("KimiLinearForCausalLM", {**KIMI, "q_lora_rank": 20, "n_shared_experts": 2, "linear_num_heads": 2}),
    ),
}
BEYOND = {
    "baichuan 7b": "baichuan",
    "baichuan 13b": "baichuan",
    "internlm2": "internlm2",
    "qwen": "qwen",
    "aquila": "llama",
    "aquila2": "llama",
    "internlm": "llama",
    "internlm3": "llama",
}
"""Names in `general.architecture`. Converters store other models with Llama's architecture, including those with
biases, as `llama`.
"""


def assert_equal_answers(one: Path, other: Path, load: Callable[..., Any], make_driver: Callable[[Any], Any]) -> None:
    """Check that both are the same model, by greedy answers and their log probabilities."""
    expected, found = (make_driver(load(path)).greedy(PROMPTS, 8) for path in (one, other))
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(here.logprobs), torch.tensor(there.logprobs), rtol=0, atol=1e-4)
