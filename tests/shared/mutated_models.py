"""Models of every family whose settings are changed, one value at a time: nothing that a publisher writes is trusted.

`config.json` is mutated by every key that the family has or reads, GGUF metadata by every key of the file.
`tests/protocol/test_mutated_models.py` and `make fuzz` load what this module makes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from family_models import BLOOM, FALCON, GEMMA2, GEMMA3, GPT2, GPTJ, GRANITE, LLAMA, MPT, NEOX, OPT
from hybrid_models import LFM2, OTHERS, STATE_SPACES
from hybrid_models import QWEN as HYBRID

from pagemill_models.declaration.known import BUILT_IN
from pagemill_models.spec.decoders import decoder_from_config

VOCAB_SIZE = 64
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255),
    *(2**24, 2**31, 2**63, -(2**63), 10**30),
    *(0.0, 0.5, -0.5, 1e-300, 1e300),
    *("", "x", "llama3", "NaN", "\u0000", "x" * 70_000),
    *([], [1], [None, {}], [1e300] * 1000, {}, {"factor": 2.0}, {"x": [{"x": 1}]}),
)
"""The table that each key's value is replaced by. `json` writes all of them; readers of JSON refuse none."""
FLOATS = (float("nan"), float("inf"), -float("inf"))
"""Values that only GGUF can have."""
_MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
_MOE |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_BERT = {**LLAMA, "max_position_embeddings": 512}
_QWEN = {**LLAMA, "kv_channels": 16, "seq_length": 256}
_OWN: dict[str, dict[str, Any]] = {
    "baichuan": {**LLAMA, "num_key_value_heads": 4},
    "bloom": BLOOM,
    "falcon": FALCON,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": NEOX,
    "gptj": GPTJ,
    "granite": GRANITE,
    "mpt": MPT,
    "opt": OPT,
    "qwen": _QWEN,
    **dict.fromkeys(("bert", "roberta", "xlm_roberta", "modernbert"), _BERT),
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss"), LLAMA | _MOE),
    "bamba": STATE_SPACES["bamba"][1],
    "falcon_h1": {**STATE_SPACES["falcon-h1"][1], "num_hidden_layers": 3},
    "granitemoehybrid": STATE_SPACES["granitemoehybrid"][1],
    "lfm2": LFM2,
    "lfm2_moe": OTHERS["lfm2-moe"][1],
    "lfm3": OTHERS["lfm3"][1],
    "olmo_hybrid": OTHERS["olmo-hybrid"][1],
    "nemotron_h": OTHERS["nemotron-h"][1],
    "kimi_linear": {**OTHERS["kimi-linear"][1], "num_experts": 6, "num_experts_per_token": 2},
    "qwen3_5": HYBRID,
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), HYBRID | _MOE),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        LLAMA | _MOE | _LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NESTED: dict[str, dict[str, Any]] = {
    "rope_scaling": _YARN,
    "rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 1e4},
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
}
"""Objects whose own keys are mutated too, in a Llama."""


class Recorded(dict[str, Any]):
    """Settings that keep which keys were asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


BY_TRANSFORMERS = {"ernie4_5": "Ernie4_5ForCausalLM", "helium": "HeliumForCausalLM"}
"""Types of models without a family, whose classes in transformers compute them."""
FAMILIES = (*BUILT_IN, *BY_TRANSFORMERS)


def config_of(family: str) -> dict[str, Any]:
    if family in BY_TRANSFORMERS:
        architecture, model_type = BY_TRANSFORMERS[family], family
    else:
        architecture, model_type = BUILT_IN[family].architectures[0], BUILT_IN[family].model_type
    common = {"architectures": [architecture], "model_type": model_type, "vocab_size": VOCAB_SIZE}
    return common | _OWN.get(family, LLAMA)


def mutations_of_config(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was changed, and the settings: every key that the family has or reads, by every value."""
    config = config_of(family)
    recorded = Recorded(config)
    decoder_from_config(recorded, Path("model/config.json"))
    for key in sorted(recorded.asked | config.keys()):
        for value in VALUES:
            yield f"{key} = {str(value)[:40]}", config | {key: value}
    if family != "llama":
        return
    for outer, inside in NESTED.items():
        for key in inside:
            for value in VALUES:
                yield f"{outer}.{key} = {str(value)[:40]}", config | {outer: inside | {key: value}}


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write the headers of the model's weights, and no data: what readers of headers look at."""
    if config["model_type"] in BY_TRANSFORMERS:  # the names of their tensors are not known
        config = config_of("llama")
    shapes = decoder_from_config(config, folder / "config.json").shapes()
    header, end = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2
        for size in shape:
            num_bytes *= size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


SPARSE = ("gpt-oss", "deepseek2", "kimi-linear", "minimax-m2", "mistral4", "qwen3next")
LATENT = ("deepseek2", "kimi-linear", "mistral4")


def gguf_metadata(architecture: str) -> dict[str, Any]:
    own = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "vocab_size": VOCAB_SIZE,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "attention.sliding_window": 24,
        "use_parallel_residual": True,
        "attention.max_alibi_bias": 8.0,
        "logit_scale": 1.5,
        "embedding_scale": 1.5,
        "residual_scale": 0.5,
        "attention.scale": 0.25,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    if architecture in ("bloom", "gpt2", "mpt", "falcon", "starcoder", "gptj", "gptneox", "baichuan"):
        own |= {"attention.head_count_kv": 1 if architecture in ("falcon", "starcoder") else 4}
    if architecture in ("bloom", "gpt2", "mpt", "starcoder", "gpt-oss"):
        own = {key: value for key, value in own.items() if not key.startswith("rope.")}
    if architecture == "baichuan":  # of one size, by which ALiBi is decided
        own |= {"embedding_length": 4096, "attention.head_count": 32, "attention.head_count_kv": 32}
        own |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 128)
    if architecture in ("olmo2", "nemotron_h", "nemotron_h_moe"):
        del own["attention.sliding_window"]
    if "moe" in architecture or architecture in SPARSE:
        own |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
        own |= {"expert_shared_feed_forward_length": 32, "expert_shared_count": 1, "expert_gating_func": 2}
        own |= {"expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_scale": 1.0}
    if architecture in ("lfm2", "lfm2moe"):
        own |= {"shortconv.l_cache": 3}
    if architecture in LATENT:
        own |= {"attention.kv_lora_rank": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16}
        own |= {"rope.dimension_count": 8, "leading_dense_block_count": 1}
        del own["rope.scaling.type"], own["rope.scaling.factor"], own["rope.scaling.original_context_length"]
    own |= _hybrid_metadata(architecture)
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}


def _hybrid_metadata(architecture: str) -> dict[str, Any]:
    if architecture == "mistral4":
        return {"expert_gating_func": 1}
    if architecture == "gemma4":
        pattern = {"attention.sliding_window_pattern": [True, False], "attention.key_length_swa": 16}
        return {**pattern, "rope.freq_base_swa": 1e4, "attention.shared_kv_layers": 0}
    own: dict[str, Any] = {
        "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    }  # fmt: skip
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        return own | {"full_attention_interval": 2}
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        lists = {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": True}
        return own | lists | ({"feed_forward_length": [128, 0]} if architecture.startswith("nemotron") else {})
    if architecture == "kimi-linear":
        return {"ssm.conv_kernel": 4, "kda.head_dim": 16, "attention.head_count_kv": [0, 1]}
    return own if architecture == "falcon-h1" else {}


def mutations_of_gguf(architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
    metadata = gguf_metadata(architecture)
    for key in metadata:
        for value in (*VALUES, *FLOATS):
            changed = dict(metadata)
            if value is None:
                del changed[key]
            elif isinstance(value, dict) or (isinstance(value, list) and None in value):
                continue  # no such values in the format
            else:
                changed[key] = value
            yield f"{key} = {str(value)[:40]}", changed


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> bytes:
    """Return a GGUF file of F32 zeros. `tensors`: shapes as in torch."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset = 0
    for name, shape in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, offset)
        num_bytes = 4
        for size in shape:
            num_bytes *= size
        offset += -(-num_bytes // 32) * 32
    return head + bytes(-len(head) % 32 + offset)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        if value and all(type(each) is int and abs(each) < 2**31 for each in value):
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        kind = 8 if value and isinstance(value[0], str) else 12
        entries = b"".join(_text(each) if kind == 8 else struct.pack("<d", each) for each in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + entries
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<IQ", 10, value)
    if isinstance(value, int | float):
        return struct.pack("<Id", 12, value)
    return struct.pack("<I", 8) + _text(str(value))
