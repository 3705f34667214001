"""Hugging Face folders of dense families as GGUF files, in the format of llama.cpp's converters.

The names come from the `gguf` package's tables, the rows are in llama.cpp's order, and norms have their offset added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from hybrid_gguf import HYBRID_CHANGES, Change, Config, hybrid_keys, rotary_pairs
from safetensors.torch import load_file
from sparse_gguf import SPARSE_CHANGES, gemma4_divisors, gemma4_keys, sparse_keys, yarn_keys
from torch import Tensor

SPLIT_TENSORS = 9

_METADATA = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "use_parallel_residual": ("use_parallel_residual",),
}
_WINDOWED = ("cohere2", "exaone4", "gemma2", "gemma3", "phi3")
_ROTATED_APART = ("granite", "llama", "smollm3")
_AROUND_ONE = ("gemma", "gemma2", "gemma3", "nemotron")


def write_family_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    *,
    parts: int = 1,
    tokenizer: str | None = None,
    embedding: str = "F32",
    matrices: Mapping[str, str] = MappingProxyType({}),
    **metadata: Any,
) -> None:
    """Write a family as GGUF.

    `parts` is the number of files of a split model, with the first at `path`. `tokenizer` is its kind; with `no_vocab`,
    llama.cpp can read a file without one. `embedding` is the type of the words' matrix, and
    `matrices` are those of others, by their names. `metadata` are keys in addition to those of the configuration.
    """
    config: Config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=SPLIT_TENSORS if parts > 1 else 0)
    for key, value in (_common(config, architecture) | _own(config, architecture) | metadata).items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }  # fmt: skip
        add[type(value)](f"{architecture}.{key}", value)
    if tokenizer is not None:
        writer.add_tokenizer_model(tokenizer)
    for name, tensor in _tensors(folder, config, architecture).items():
        kind = gguf.GGMLQuantizationType[embedding if name == "token_embd.weight" else matrices.get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().contiguous().numpy(), kind), raw_dtype=kind)
    _finish(writer)


def write_adapter_gguf(
    path: Path, folder: Path, architecture: str, matrices: dict[str, tuple[Tensor, Tensor]], alpha: float
) -> None:
    """Write an adapter for `folder`'s model: A [rank, in] and B [out, rank] by the names of modules."""
    config: Config = json.loads((folder / "config.json").read_text())
    names = _names(config, architecture)
    # A and B are those of the module, whatever the order in which its matrix is stored.
    change = _changed(architecture if architecture != "gpt2" else "")
    tensors = {}
    for module, (a, b) in matrices.items():
        for part, rows in change(f"{module}.weight", b, config).items():
            short = part if part.startswith("blk.") else names.get_name(part, try_suffixes=(".weight",))
            tensors[f"{short}.lora_a"] = a.T if short == "token_embd.weight" else a
            tensors[f"{short}.lora_b"] = rows
    write_lora(path, architecture, tensors, alpha)


def write_lora(
    path: Path, architecture: str, tensors: dict[str, Tensor], alpha: float, *, kind: str = "F32",
    general_type: str = gguf.GGUFType.ADAPTER, metadata: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Write an adapter as llama.cpp's converter does. `tensors`: with the names and orders of the file."""
    writer, storage = gguf.GGUFWriter(path, architecture), gguf.GGMLQuantizationType[kind]
    writer.add_type(general_type)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    for name, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        if kind == "Q8_1":  # the package writes none
            block, size = gguf.GGML_QUANT_SIZES[storage]
            values = np.zeros((*values.shape[:-1], values.shape[-1] // block * size), dtype=np.uint8)
        else:
            values = gguf.quants.quantize(values, storage)
        writer.add_tensor(name, values, raw_dtype=storage)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _names(config: Config, architecture: str) -> gguf.TensorNameMap:
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = (len(config[key]) for key in ("layers_block_type",) if config.get(key))
    num_layers = next(layers, None) or next(config[name] for name in _METADATA["block_count"] if name in config)
    return gguf.get_tensor_name_map(kind, num_layers + 1)  # a layer that drafts is behind the others


def _common(config: Config, architecture: str) -> dict[str, Any]:
    found = {key: next((config[name] for name in names if config.get(name) is not None), None)
             for key, names in _METADATA.items()}  # fmt: skip
    found["feed_forward_length"] = found["feed_forward_length"] or 4 * found["embedding_length"]
    if architecture in _WINDOWED:
        found["attention.sliding_window"] = config.get("sliding_window") or 0
    return {key: value for key, value in found.items() if value is not None} | _rope(config, found)


def _rope(config: Config, found: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = found["attention.key_length"] or found["embedding_length"] // found["attention.head_count"]
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    keys: dict[str, Any] = {"rope.dimension_count": int(head_dim * share)}
    if "rope_theta" in rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        magnitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        keys |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": magnitude}
    return keys


def _own(config: Config, architecture: str) -> dict[str, Any]:
    if architecture in HYBRID_CHANGES:
        return hybrid_keys(config, architecture)
    if architecture == "mistral3":
        beta = config["rope_parameters"]["llama_4_scaling_beta"]
        return yarn_keys(config["rope_parameters"], 1.0) | {"attention.temperature_scale": beta}
    if architecture == "gemma4":
        return gemma4_keys(config)
    if architecture in SPARSE_CHANGES:
        return sparse_keys(config, architecture)
    if architecture in ("deepseek2", "mistral4"):
        return _deepseek2(config)
    if architecture == "olmo2" and "layer_types" in config:
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": windowed}
    if architecture == "falcon":
        grouped = config.get("new_decoder_architecture")
        return {"attention.head_count_kv": config.get("num_kv_heads", 1) if grouped else 1}
    if architecture == "gptj":
        return {"rope.dimension_count": config["rotary_dim"]}
    if architecture == "bloom":
        return {"context_length": 2048}
    if architecture == "starcoder":
        return {"attention.head_count_kv": 1}
    if architecture == "gemma3":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        return {"rope.freq_base_swa": float(local)}
    if architecture == "hunyuan-dense":  # converters multiply the base instead of writing the scaling
        rope, size = config["rope_parameters"], config["head_dim"]
        return {"rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))}
    if architecture == "mpt":
        settings = config["attn_config"]
        clip = settings.get("clip_qkv")
        bound = {} if clip is None else {"attention.clamp_kqv": float(clip)}
        return {"attention.max_alibi_bias": float(settings["alibi_bias_max"]), **bound}
    if architecture.startswith("lfm2"):
        return _lfm2(config)
    if architecture == "olmoe":
        return {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return {}


def _lfm2(config: Config) -> dict[str, Any]:
    """Layers of convolutions have no heads of keys and values."""
    heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
    keys = {
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" in config:
        return keys | {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    multiple = config["block_multiple_of"]
    inner = int(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * config["intermediate_size"] / 3)
    return keys | {"feed_forward_length": -(-inner // multiple) * multiple}


def _deepseek2(config: Config) -> dict[str, Any]:
    turning, latent, values = (config[key] for key in ("qk_rope_head_dim", "kv_lora_rank", "v_head_dim"))
    is_v3 = config["model_type"] in ("deepseek_v3", "glm4_moe_lite")
    rope, is_mistral = config["rope_parameters"], config["model_type"] == "mistral4"
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + turning,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
        "attention.value_length_mla": values,
        "attention.kv_lora_rank": latent,
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if is_v3 else 1,
        "rope.dimension_count": turning,
    }
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if is_v3 or is_mistral or config["topk_method"] == "group_limited_greedy":
        keys |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if is_mistral:
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return keys | (yarn_keys(rope, 10.0) if rope["rope_type"] == "yarn" else {})


def _latent(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if name.endswith("e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor}
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        part = "gate_up" if "gate_up" in name else "down"
        return {f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight": tensor}
    if "kv_b_proj" not in name:
        return {name: tensor}
    by_head = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
    keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}


def _tensors(folder: Path, config: Config, architecture: str) -> dict[str, Tensor]:
    names = _names(config, architecture)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _stacked_experts(load_file(folder / "model.safetensors")).items():
        for part, values in _changed(architecture)(name, tensor, config).items():
            short = part if part.startswith("blk.") else names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert short is not None, part
            tensors[short] = values
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = gemma4_divisors(config)
    for which in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        tensors[f"rope_factors_{which}.weight"] = torch.tensor(rope[f"{which}_factor"])
    return tensors


def _stacked_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices of a layer's experts, and the norms of its heads, as one tensor."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        short = re.sub(r"\.norms\.\d+", "", re.sub(r"experts\.\d+", "experts", name))
        found.setdefault(short, []).append(weights[name])
    return {name: torch.stack(each) if len(each) > 1 else each[0] for name, each in found.items()}


def _changed(architecture: str) -> Change:
    if architecture in _ROTATED_APART:
        return _permuted
    if architecture in _AROUND_ONE:
        return lambda name, tensor, _: {name: tensor + 1 if name.endswith("norm.weight") else tensor}
    changes: dict[str, Change] = {
        **HYBRID_CHANGES, **SPARSE_CHANGES,
        "baichuan": _unpacked, "internlm2": _ungrouped, "bloom": _bloom, "gptneox": _by_part, "falcon": _falcon,
        "gpt2": _turned, "deepseek2": _latent, "mistral4": _latent, "lfm2": _lfm2_tensors, "lfm2moe": _lfm2_tensors,
    }  # fmt: skip
    return changes.get(architecture, lambda name, tensor, _: {name: tensor})


def _permuted(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((key for part, key in heads.items() if part in name), None)
    return {name: tensor if key is None else rotary_pairs(tensor, config.get(key, config["num_attention_heads"]))}


def _unpacked(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if "W_pack" not in name:
        return {name: tensor}
    query, key, value = tensor.chunk(3)
    layer, heads = name.split(".")[2], config["num_attention_heads"]
    pairs = {"q": rotary_pairs(query, heads), "k": rotary_pairs(key, heads), "v": value}
    return {f"blk.{layer}.attn_{part}.weight": rows for part, rows in pairs.items()}


def _ungrouped(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if "wqkv" not in name:
        return {name: tensor}
    heads, groups, layer = config["num_attention_heads"], config["num_key_value_heads"], name.split(".")[2]
    rows = tensor.view(groups, heads // groups + 2, -1, tensor.shape[1])
    query, key, value = (each.reshape(-1, tensor.shape[1]) for each in (rows[:, :-2], rows[:, -2], rows[:, -1]))
    pairs = {"q": rotary_pairs(query, heads), "k": rotary_pairs(key, groups), "v": value}
    return {f"blk.{layer}.attn_{part}.weight": rows for part, rows in pairs.items()}


def _by_part(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if "query_key_value" not in name:
        return {name: tensor}
    heads = config.get("num_attention_heads") or config["n_head"]
    return {name: tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)}


def _bloom(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    return {each.removeprefix("transformer."): rows for each, rows in _by_part(name, tensor, config).items()}


def _falcon(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    if "query_key_value" not in name:
        return {name: tensor}
    heads = config["num_attention_heads"]
    groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    rows = tensor.view(groups, heads // groups + 2, -1, tensor.shape[1])
    return {name: torch.cat([each.flatten(0, -2) for each in (rows[:, :-2], rows[:, -2], rows[:, -1])])}


def _lfm2_tensors(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    of_experts = {
        "feed_forward.expert_bias": "exp_probs_b.bias",
        "feed_forward.gate.weight": "ffn_gate_inp.weight",
        "experts.w1.weight": "ffn_gate_exps.weight",
        "experts.w3.weight": "ffn_up_exps.weight",
        "experts.w2.weight": "ffn_down_exps.weight",
    }
    for ending, short in of_experts.items():
        if name.endswith(ending):
            return {f"blk.{name.split('.')[2]}.{short}": tensor}
    return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}


def _turned(name: str, tensor: Tensor, config: Config) -> dict[str, Tensor]:
    return {name: tensor.T if ".c_" in name and tensor.dim() == 2 else tensor}
