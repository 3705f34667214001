"""Compares decodes of quantized checkpoints in other projects' formats with a GGUF file of Q4_1 of the same shape.

Random weights, one request, all models in one process and alternating; the median of the runs counts, and the median of
the ratios within one turn. `--cpu-time` is for a busy machine, with one thread: threads that wait for each other take
CPU time too. Goal: 4-bit integers at least 0.9 times as fast as Q4_1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
import torch
from experts import DENSE, Decodes
from report import emit
from safetensors.torch import save_file
from torch import Tensor

from pagemill_models.spec.decoders import decoder_from_config

GROUP = 128
PEER = "GGUF Q4_1"
Packed = dict[str, Tensor]
"""The stored tensors of one matrix, by the suffixes of their names."""


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape) * 0.002 + 0.002).half()


def awq(rows: int, columns: int) -> Packed:
    groups = columns // GROUP
    return {"qweight": words(columns, rows // 8), "qzeros": words(groups, rows // 8), "scales": scales(groups, rows)}


def gptq(rows: int, columns: int) -> Packed:
    groups = columns // GROUP
    return {"qweight": words(columns // 8, rows), "qzeros": words(groups, rows // 8), "scales": scales(groups, rows)}


def int8(rows: int, columns: int) -> Packed:
    return {"weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8), "weight_scale": scales(rows, 1)}


def fp8(rows: int, columns: int) -> Packed:
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    return {"weight": torch.randn(rows, columns).to(torch.float8_e4m3fn), "weight_scale_inv": scales(*blocks).float()}


def nf4(rows: int, columns: int) -> Packed:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.rand(rows * columns // 64) * 0.02 + 0.02,
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


FORMS: dict[str, tuple[dict[str, Any], Callable[[int, int], Packed]]] = {
    "AWQ, groups of 128": ({"quant_method": "awq", "bits": 4}, awq),
    "GPTQ, groups of 128": ({"quant_method": "gptq", "bits": 4}, gptq),
    "compressed-tensors int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
    "FP8, blocks of 128": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8),
    "bitsandbytes NF4, blocks of 64": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}


def write_folder(folder: Path, settings: dict[str, Any], pack: Callable[[int, int], Packed]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**DENSE, "quantization_config": settings}))
    stored: Packed = {}
    for name, shape in decoder_from_config(DENSE, folder / "config.json").shapes().items():
        if "proj." not in name:
            stored[name] = torch.randn(shape).bfloat16() * 0.02
            continue
        packed = pack(shape[0], shape[1])
        stored |= {name.removesuffix("weight") + ending: tensor for ending, tensor in packed.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def write_q4_1(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    hidden, inner = DENSE["hidden_size"], DENSE["intermediate_size"]
    kv = hidden // DENSE["num_attention_heads"] * DENSE["num_key_value_heads"]
    writer.add_block_count(DENSE["num_hidden_layers"])
    writer.add_context_length(DENSE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(DENSE["num_attention_heads"])
    writer.add_head_count_kv(DENSE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(DENSE["vocab_size"])
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.random.randn(DENSE["vocab_size"], hidden).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    sizes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
    }
    sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for layer in range(DENSE["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        for name, (rows, columns) in sizes.items():
            blocks = np.random.randint(0, 256, (rows, columns // 32, 20), dtype=np.uint8)
            blocks[..., :4] = np.array([0.003, -0.02], np.float16).view(np.uint8)
            data = blocks.reshape(rows, -1)
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {PEER: write_q4_1(folder / "q4_1.gguf")}
        paths |= {form: write_folder(folder / str(at), *each) for at, (form, each) in enumerate(FORMS.items())}
        decodes = {form: Decodes(path, args.threads, {}) for form, path in paths.items()}
        runs: dict[str, list[float]] = {form: [] for form in decodes}
        for _ in range(args.runs):
            for form, each in decodes.items():
                runs[form].append(each.seconds(args.tokens, clock=clock))
    times = {form: median(each) for form, each in runs.items()}
    ratios = {form: median(peer / it for peer, it in zip(runs[PEER], each, strict=True)) for form, each in runs.items()}
    rows = [
        [form, f"{times[form] * 1000:.2f}", decodes[form].weight_bytes / 2**20, f"{ratios[form]:.2f}x"]
        for form in decodes
    ]
    emit(
        "quantized", ["checkpoint", "ms", "weights MiB", "Q4_1 / it"], rows, {"ratios": ratios, "threads": args.threads}
    )


if __name__ == "__main__":
    main()
