"""Small models in the packed formats of other projects, whose values are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def words(integers: Tensor, bits: int) -> Tensor:
    """Pack [n, m] into int32 [n, m * bits / 32], with the first value in the lowest bits."""
    grouped = integers.long().view(integers.shape[0], -1, 32 // bits)
    packed = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def drawn(shape: tuple[int, int], bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = (shape[0], shape[1] // group_size)
    integers = torch.randint(0, 2**bits, shape)
    scales = (torch.rand(groups) * 0.5 + 0.5).half() * (2.0 ** (2 - bits) * 0.3)
    return integers, scales, torch.randint(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 2, groups)


def grouped_values(integers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    repeats = integers.shape[1] // scales.shape[1]
    spread_zeros, spread_scales = (each.float().repeat_interleave(repeats, 1) for each in (zeros, scales))
    return (integers - spread_zeros) * spread_scales


Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by the endings of their names, and the values."""


def awq(shape: tuple[int, int]) -> Packed:
    integers, scales, zeros = drawn(shape, 4, 32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = (
        words(each.t().reshape(each.shape[1], -1, 8)[..., order].flatten(1), 4) for each in (integers, zeros)
    )
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t()}, grouped_values(integers, scales, zeros)


def gptq(shape: tuple[int, int], bits: int = 4) -> Packed:
    integers, scales, zeros = drawn(shape, bits, 32)
    group_of = (torch.arange(shape[1]) // 32).to(torch.int32)
    tensors = {
        "qweight": words(integers, bits).t(),
        "qzeros": words(zeros.t() - 1, bits),
        "scales": scales.t(),
        "g_idx": group_of,
    }
    return tensors, grouped_values(integers, scales, zeros)


def gptq_dynamic(shape: tuple[int, int]) -> Packed:
    """Return a matrix of 8 bits for that of `DYNAMIC`."""
    return gptq(shape, 8 if shape[1] == SHAPE["intermediate_size"] else 4)


def gptq_act_order(shape: tuple[int, int]) -> Packed:
    """Return a matrix whose groups `desc_act` scatters over the inputs, equally for equal inputs."""
    tensors, _ = gptq(shape)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(shape[1]))
    integers, scales, zeros = drawn(shape, 4, 32)
    group_of = (torch.arange(shape[1]) // 32)[order]
    tensors |= {"qweight": words(integers, 4).t(), "qzeros": words(zeros.t() - 1, 4), "scales": scales.t()}
    tensors["g_idx"] = group_of.to(torch.int32)
    return tensors, (integers - zeros.float()[:, group_of]) * scales.float()[:, group_of]


def channel_int8(shape: tuple[int, int]) -> Packed:
    weight = torch.randint(-127, 128, shape).to(torch.int8)
    scales = torch.rand(shape[0], 1) * 0.004 + 0.002
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales


def fp8_blocks(shape: tuple[int, int]) -> Packed:
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 48), -(-shape[1] // 32)) * 0.002 + 0.002
    spread = scales.repeat_interleave(48, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    return {"weight": weight, "weight_scale_inv": scales}, weight.float() * spread


def fp8_channels(shape: tuple[int, int]) -> Packed:
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0], 1) * 0.002 + 0.002
    return {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}, weight.float() * scales


def fp8_tensor(shape: tuple[int, int]) -> Packed:
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.tensor(0.003)}, weight.float() * 0.003


def nvfp4(shape: tuple[int, int]) -> Packed:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(0, 16, shape)
    scales = (torch.rand(shape[0], shape[1] // 16) * 200 + 100).to(torch.float8_e4m3fn)
    whole = torch.tensor([float(1000 + shape[0])])
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": whole,
        "input_global_scale": torch.ones(1),
    }
    return tensors, values[codes] * (scales.float() / whole).repeat_interleave(16, 1)


def bnb_int8(shape: tuple[int, int]) -> Packed:
    weight = torch.randint(-127, 128, shape).to(torch.int8)
    largest = torch.rand(shape[0]) * 0.5 + 0.3
    return {"weight": weight, "SCB": largest}, weight.float() * largest[:, None] / 127


LEVELS = [-1.0, -0.7, -0.53, -0.4, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]


def bnb_nf4(shape: tuple[int, int]) -> Packed:
    """Return blocks of 64 values that ignore the ends of rows; the first of two values is in the high bits."""
    codes = torch.randint(0, 16, (shape[0] * shape[1],))
    largest, levels = torch.rand(len(codes) // 64) * 0.5 + 0.3, torch.tensor(LEVELS)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape)}
    stored = {
        "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": largest,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (levels[codes] * largest.repeat_interleave(64)).view(shape)


def bnb_in_bfloat16(shape: tuple[int, int]) -> Packed:
    """Return the same with the indices of four values in each bfloat16, as FSDP needs them."""
    stored, values = bnb_nf4(shape)
    return stored | {"weight": stored["weight"].view(-1, 2).view(torch.bfloat16)}, values


DYNAMIC = {"+:.*\\.down_proj": {"bits": 8}, "-:lm_head": {}}
CT = {"quant_method": "compressed-tensors"}
NVFP4 = {
    **CT,
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}
    },
}
MODELS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq),
    "gptq dynamic": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": DYNAMIC}, gptq_dynamic),
    "gptq act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, gptq_act_order),
    "compressed-tensors int8": ({**CT, "format": "int-quantized"}, channel_int8),
    "compressed-tensors nvfp4": (NVFP4, nvfp4),
    "compressed-tensors fp8": ({**CT, "format": "float-quantized"}, fp8_channels),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [48, 32]}, fp8_blocks),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, bnb_nf4),
    "bitsandbytes nf4 in bfloat16": (
        {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
        bnb_in_bfloat16,
    ),
}


def write(folder: Path, name: str) -> Any:
    """Write a folder in the published format; return the model of transformers with the same values."""
    settings, pack = MODELS[name]
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    stored = {}
    for parameter, tensor in model.state_dict().items():
        if "proj." not in parameter:
            stored[parameter] = tensor.clone()
            continue
        tensors, values = pack((tensor.shape[0], tensor.shape[1]))
        tensor.copy_(values)
        stored |= {parameter.removesuffix("weight") + ending: each.contiguous() for ending, each in tensors.items()}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": settings, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def write_mxfp4(folder: Path, model: Any) -> None:
    """Write the experts' matrices as pairs of blocks and scales, as gpt-oss does; set the model to the same values."""
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    stored = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = tensor.clone()
                continue
            num_experts, inputs, outputs = tensor.shape
            codes = torch.randint(0, 16, (num_experts, outputs, inputs // 32, 16, 2), generator=generator)
            exponents = torch.randint(120, 126, (num_experts, outputs, inputs // 32), generator=generator)
            stored[f"{name}_blocks"] = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
            stored[f"{name}_scales"] = exponents.to(torch.uint8)
            scaled = values[codes.flatten(-2)] * 2.0 ** (exponents[..., None] - 127)
            tensor.copy_(scaled.flatten(2).transpose(1, 2))
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GptOssForCausalLM"]}))
