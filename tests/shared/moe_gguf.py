"""Models with experts as GGUF files in the format of llama.cpp's converters, made from transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks.weight", "mlp.gate.": "ffn_gate_inp.",
    "mlp.router": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


def write_moe_gguf(
    path: Path, model: Any, architecture: str, kind: str, factors: tuple[float, ...] | None = None
) -> None:
    """Write experts as `kind` and all other weights as float32; set the model's experts to the stored values.

    `factors`: of the values of each expert's matrices, in tensors beside them.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "gpt-oss":
        _add_gpt_oss(writer, config)
    storage = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            for part, values in _parts(name, tensor, architecture, config).items():
                is_matrix = "_exps.weight" in part
                data = values.contiguous().numpy()
                if is_matrix:
                    data = gguf.quants.quantize(data, storage)
                    values.copy_(torch.from_numpy(gguf.quants.dequantize(data, storage)).view(values.shape))
                if is_matrix and factors is not None:
                    beside = torch.tensor(factors)
                    values.mul_(beside[:, None, None])
                    writer.add_tensor(part.replace(".weight", ".scale"), beside.numpy())
                writer.add_tensor(part, data, raw_dtype=storage if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _parts(name: str, tensor: Tensor, architecture: str, config: Any) -> dict[str, Tensor]:
    """Return views of the tensor under their names in the file."""
    layer = ".".join(name.replace("model.layers", "blk").split(".")[:2])
    is_gpt_oss = architecture == "gpt-oss"
    if ".experts." in name:
        suffix = "bias" if name.endswith("_bias") else "weight"
        if is_gpt_oss:
            tensor = tensor if suffix == "bias" else tensor.transpose(1, 2)
        if "down_proj" in name:
            return {f"{layer}.ffn_down_exps.{suffix}": tensor}
        gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
        return {f"{layer}.ffn_gate_exps.{suffix}": gate, f"{layer}.ffn_up_exps.{suffix}": up}
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    second_norm = "post_attention_norm" if is_gpt_oss else "ffn_norm"
    short = name.replace("post_attention_layernorm", second_norm)
    for hugging_face, stored in _NAMES.items():
        short = short.replace(hugging_face, stored)
    return {short: tensor.squeeze(0) if "inp_shexp" in short else tensor}
