"""A list of cases: every family of transformers in every shape that its configuration allows.

Names begin with the family's module in `pagemill_models.declaration`. No vocabulary is a multiple of 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import expert_models as experts
from family_models import BLOOM, FALCON, GEMMA2, GEMMA3, GPT2, GPTJ, GRANITE, LLAMA, MPT, NEOX, NEW, OPT
from greedy_families import LENGTHS

PADDED = {**LLAMA, "pad_token_id": 0}
ROPE_LENGTHS = (2, 17, 90)
CONTEXT, ORIGINAL = 256, 16


class Case(NamedTuple):
    architecture: str
    """The name of a class of transformers."""
    overrides: dict[str, Any]
    lengths: tuple[int, ...] = LENGTHS


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", BLOOM),
    "cohere": ("CohereForCausalLM", {**LLAMA, "logit_scale": 1.5}),
    "deepseek_v2": experts.MODELS["deepseek-v2"],
    "deepseek_v3": experts.MODELS["deepseek-v3"],
    "falcon": ("FalconForCausalLM", FALCON),
    "gemma": ("GemmaForCausalLM", {**LLAMA, "head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX),
    "gptj": ("GPTJForCausalLM", GPTJ),
    "gpt_oss": experts.MODELS["gpt-oss"],
    "granite": ("GraniteForCausalLM", GRANITE),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {**experts.MODELS["mixtral"][1], "head_dim": 16}),
    "mpt": ("MptForCausalLM", {**MPT, "tie_word_embeddings": False}),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
    "olmoe": experts.VARIANTS["olmoe"],
    "opt": ("OPTForCausalLM", OPT),
    "phi": ("PhiForCausalLM", {**LLAMA, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", {**PADDED, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2_moe": experts.MODELS["qwen2-moe"],
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 32}),
    "qwen3_moe": experts.MODELS["qwen3-moe"],
    "smollm3": ("SmolLM3ForCausalLM", {**PADDED, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "starcoder2": ("Starcoder2ForCausalLM", {**LLAMA, "sliding_window": None}),
    **NEW,
    **experts.NEW,
}
_WITH_HEAD_DIM = (
    "cohere", "ernie4_5", "gemma", "gemma2", "gemma3", "gpt_oss", "granite", "llama", "mistral", "mixtral", "nemotron",
    "phi3", "glm4", "glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "seed_oss",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
"""Families whose configurations may set a head size other than hidden size / heads."""
_ONE_KV_HEAD: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 1} for name in BASES if "num_key_value_heads" in BASES[name][1]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 1},
    "deepseek_v2": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "deepseek_v3": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "glm4_moe_lite": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "mistral4": {"num_attention_heads": 1, "num_key_value_heads": 1},
}
_WINDOWS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 5},
    "gemma4": {"sliding_window": 5},
    "exaone4": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ministral3": {"sliding_window": 20},
    "olmo3": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "gemma2": {"sliding_window": 5},
    "gemma3": {"sliding_window": 5},
    "gpt_oss": {"sliding_window": 5},
    "mistral": {"sliding_window": 20},
    "mixtral": {"sliding_window": 20},
    "phi3": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 20},
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "starcoder2": {"sliding_window": 20},
}
_ROTARY_DIMS = {"gpt_neox": 8, "phi": 8, "nemotron": 8, "stablelm": 4, "deepseek_v2": 8, "deepseek_v3": 8,
                "glm4_moe_lite": 8, "glm4": 12, "glm4_moe": 12, "minimax_m2": 8}  # fmt: skip
_SHARES = {"gpt_neox": 0.25, "phi": 0.5, "nemotron": 0.5, "stablelm": 0.25, "glm4": 0.5, "glm4_moe": 0.5,
           "minimax_m2": 0.5}  # fmt: skip
_NOT_ROTATED = (
    "bloom",
    "gemma4",
    "gemma4 of one kind of value",
    "gemma4 with experts",
    "gpt2",
    "gpt_bigcode",
    "gptj",
    "ministral3",
    "mistral4",
    "mpt",
    "opt",
)
"""Families without other rotary scalings; GPT-J rotates, but its class has no scaling."""
_NOT_LONG = ("glm4_moe_lite",)
"""Families whose classes count other frequencies than the rotated ones."""
_LONG_ALONE = ("phi3",)
"""Families whose class supports no other kind."""


def _rope(name: str, kind: str) -> dict[str, Any]:
    base = BASES[name][1]
    head_dim = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    frequencies = _ROTARY_DIMS.get(name, head_dim) // 2
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0}
    if name in _SHARES:
        values["partial_rotary_factor"] = _SHARES[name]
    if kind == "longrope":
        values |= {
            "short_factor": [1.0 + 0.2 * index for index in range(frequencies)],
            "long_factor": [1.5 + 0.5 * index for index in range(frequencies)],
            "original_max_position_embeddings": ORIGINAL,
        }
    else:
        values["factor"] = 4.0
    if kind == "llama3":
        values |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = 64
    return values


def _rope_overrides(name: str, kind: str) -> dict[str, Any]:
    rope = _rope(name, kind)
    if name in ("gemma3", "olmo3"):
        return {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                                    "full_attention": rope}}  # fmt: skip
    beside = {"original_max_position_embeddings": ORIGINAL} if name == "phi3" else {}
    return {"rope_parameters": rope, **beside}


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, (architecture, base) in BASES.items():
        cases[name] = Case(architecture, base)
        if name in _WITH_HEAD_DIM:
            cases[f"{name}, heads of 48"] = Case(architecture, {**base, "head_dim": 48})
            cases[f"{name}, heads of 20"] = Case(architecture, {**base, "head_dim": 20})
        if name in _ONE_KV_HEAD:
            cases[f"{name}, one KV head"] = Case(architecture, base | _ONE_KV_HEAD[name])
        if name in _WINDOWS:
            cases[f"{name}, short window"] = Case(architecture, base | _WINDOWS[name])
        kinds = () if name in _NOT_ROTATED else ("longrope",) if name in _LONG_ALONE else ROPE_KINDS
        for kind in kinds:
            if kind == "longrope" and name in _NOT_LONG:
                continue
            # Only beyond the original context: transformers chooses its factors by the length of each sequence.
            lengths = ROPE_LENGTHS[1:] if kind == "longrope" else ROPE_LENGTHS
            cases[f"{name}, {kind}"] = Case(architecture, base | _rope_overrides(name, kind), lengths)
    return cases


ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
CASES = _cases()
