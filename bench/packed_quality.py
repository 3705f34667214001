"""Measures perplexity of quantized checkpoints in other projects' formats, and of the float32 values they represent.

The embedded model's matrices are rounded to each format; one folder holds them packed, another their values in float32.
The order of units differs from the embedded file's, whose values are on a 4-bit grid already. Goal: equal within 0.1 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quality import TEXT, measure, renumbered_model
from report import emit
from safetensors.torch import load_file, save_file
from torch import Tensor
from workload import MODEL

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle

GROUP = 64
GOAL_PERCENT = 0.1
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""QLoRA, appendix E: quantiles of a normal distribution."""
Packed = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of one matrix by the suffixes of their names, and the values that they represent."""


def words(integers: Tensor) -> Tensor:
    """Pack [n, m] 4-bit integers into int32 [n, m / 8], the first in the lowest bits."""
    packed = (integers.long().view(integers.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 4-bit integers [rows, columns], float16 scales and zeros [rows, groups]."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    integers = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return integers.view(weight.shape).long(), scales, zeros.long()


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Expand scales of blocks to each element of [rows, columns]."""
    shape = (-(-rows // scales.shape[0]), -(-columns // scales.shape[1]))
    return scales.float().repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)[:rows, :columns]


def held(integers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    shape = integers.shape[0], integers.shape[1]
    return (integers - spread(zeros, *shape)) * spread(scales, *shape)


def awq(weight: Tensor) -> Packed:
    integers, scales, zeros = rounded(weight)
    stored = {
        name: words(each.t().reshape(each.shape[1], -1, 8)[..., AWQ_ORDER].flatten(1))
        for name, each in (("qweight", integers), ("qzeros", zeros))
    }
    return {**stored, "scales": scales.t()}, held(integers, scales, zeros)


def gptq(weight: Tensor) -> Packed:
    return _gptq(weight, torch.arange(weight.shape[1]))


def gptq_act_order(weight: Tensor) -> Packed:
    """Pack groups of inputs in a random order, the same in all matrices of the same inputs."""
    return _gptq(weight, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1])))


def _gptq(weight: Tensor, order: Tensor) -> Packed:
    """Pack a matrix; `order` lists the inputs by group."""
    integers, scales, zeros = rounded(weight[:, order])
    group_of = torch.empty(weight.shape[1], dtype=torch.int32)
    group_of[order] = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    placed, values = torch.empty_like(integers), torch.empty_like(weight)
    placed[:, order], values[:, order] = integers, held(integers, scales, zeros)
    stored = {"qweight": words(placed).t(), "qzeros": words(zeros.t() - 1)}
    return {**stored, "scales": scales.t(), "g_idx": group_of}, values


def w4a16(weight: Tensor) -> Packed:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).clamp(min=1e-6).bfloat16()
    integers = (groups / scales.float()[..., None]).round().clamp(-8, 7).view(weight.shape).long()
    shape = torch.tensor(weight.shape)
    return (
        {"weight_packed": words(integers + 8), "weight_scale": scales, "weight_shape": shape},
        integers * spread(scales, weight.shape[0], weight.shape[1]),
    )


def int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    integers = (weight / scales).round().to(torch.int8)
    return {"weight": integers, "weight_scale": scales}, integers * scales


def fp8_channels(weight: Tensor) -> Packed:
    return _fp8(weight, weight.abs().amax(-1, keepdim=True) / 448, "weight_scale")


def fp8_tensor(weight: Tensor) -> Packed:
    stored, values = _fp8(weight, weight.abs().amax().view(1, 1) / 448, "weight_scale")
    return {**stored, "weight_scale": stored["weight_scale"].view(())}, values


def fp8_blocks(weight: Tensor) -> Packed:
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    everywhere = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / everywhere).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * everywhere


def _fp8(weight: Tensor, scales: Tensor, name: str) -> Packed:
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales}, codes.float() * scales


def nf4(weight: Tensor) -> Packed:
    """Pack as bitsandbytes does: blocks of 64 in a row, the first of two values in the high bits."""
    levels, blocks = torch.tensor(NF4), weight.reshape(-1, 64)
    largest = blocks.abs().amax(-1)
    codes = torch.bucketize(blocks / largest[:, None], (levels[1:] + levels[:-1]) / 2)
    pairs = codes.view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    stored = {
        "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": largest,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (levels[codes] * largest[:, None]).view(weight.shape)


_CT = {"quant_method": "compressed-tensors"}
_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "GPTQ, act-order": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq_act_order),
    "compressed-tensors w4a16": (
        {**_CT, "format": "pack-quantized", "config_groups": {"0": {"targets": ["Linear"], "weights": _GROUPS}}},
        w4a16,
    ),
    "compressed-tensors int8": ({**_CT, "format": "int-quantized"}, int8),
    "compressed-tensors FP8": ({**_CT, "format": "float-quantized"}, fp8_channels),
    "FP8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "FP8, blocks of 128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "bitsandbytes NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}


def write_pair(source: Path, folder: Path, settings: dict[str, Any], pack: Callable[[Tensor], Packed]) -> None:
    """Write `folder`/packed and `folder`/values."""
    stored, values = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values[name] = tensor
        if "proj." not in name:
            stored[name] = tensor
            continue
        packed, values[name] = pack(tensor)
        stored |= {name.removesuffix("weight") + ending: each.contiguous() for ending, each in packed.items()}
    config = json.loads((source / "config.json").read_text())
    for kind, tensors, more in (("packed", stored, {"quantization_config": settings}), ("values", values, {})):
        (folder / kind).mkdir()
        save_file(tensors, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(config | more))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, default=512, help="number of tokens of a window")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument(
        "--dtype", default="float32", help="type in which the packed checkpoint is computed; `auto`: as it is served"
    )
    args = parser.parse_args()
    path = resolve_source(MODEL)
    token_ids = Tokenizer(load_bundle(path)).encode(TEXT.read_text())
    rows, differences = [], {}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        renumbered_model(path, source)
        for form in args.formats:
            with tempfile.TemporaryDirectory(dir=name) as each:
                write_pair(source, Path(each), *FORMATS[form])
                reference: list[Tensor] = []
                values, packed = (
                    measure(f"{each}/{kind}", token_ids, args.window, {"dtype": dtype}, reference)
                    for kind, dtype in (("values", "float32"), ("packed", args.dtype))
                )
            differences[form] = 100 * abs(packed["perplexity"] / values["perplexity"] - 1)
            rows.append(
                [form, values["perplexity"], packed["perplexity"], f"{differences[form]:.4f} %", packed["weight_mib"]]
            )
    emit(
        "packed_quality",
        ["checkpoint", "its values", "packed", "difference", "weights MiB"],
        rows,
        {"percent": differences, "goal_percent": GOAL_PERCENT},
    )


if __name__ == "__main__":
    main()
