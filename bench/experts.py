"""Compares decodes of a mixture of experts, and of families with layer norms, with a Llama that reads as many bytes.

Random weights, one request, all models in one process and alternating; the median of the runs counts. Goal: at least
0.8 of the Llama's share of the memory bandwidth. With `--beside-torch`, each model is compared with itself where torch
calls its operations one by one.
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
from unittest.mock import patch

import torch
from report import emit
from safetensors.torch import save_file

from pagemill_engine.config import EngineConfig
from pagemill_engine.decoders.native.layers import can_fuse
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.starting.factory import create_runner
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
INNER, EXPERTS, TOP_K = 1792, 8, 2
DENSE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "intermediate_size": TOP_K * INNER, **SHAPE}
MOE = {"architectures": ["MixtralForCausalLM"], "intermediate_size": INNER, **SHAPE}
MOE |= {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
# Two matrices instead of three; GPT-NeoX has as many key heads as query heads.
STARCODER2 = {"architectures": ["Starcoder2ForCausalLM"], "intermediate_size": 5376, **SHAPE}
STARCODER2 |= {"tie_word_embeddings": False, "sliding_window": None}
NEOX = {"architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 4608, **SHAPE}
# GLM-4.5's parts: sigmoids with a bias of choices, a shared expert, a dense first layer.
GLM: dict[str, Any] = {"architectures": ["Glm4MoeForCausalLM"], "intermediate_size": TOP_K * INNER, **SHAPE}
GLM |= {"moe_intermediate_size": 512, "n_routed_experts": 24, "num_experts_per_tok": 6, "n_shared_experts": 1}
GLM |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 64, "use_qk_norm": True}
# DeepSeek-V3's: latents of 512, compressed queries, choices by groups.
V3: dict[str, Any] = {**GLM, "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 16, "q_lora_rank": 384}
V3 |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V3 |= {"n_group": 4, "topk_group": 2}
# Gemma 4 E2B's: inputs of layers, keys that half of them share, wide MLPs, heads of two sizes.
GEMMA4: dict[str, Any] = {**SHAPE, "architectures": ["Gemma4ForCausalLM"], "intermediate_size": 3072}
GEMMA4 |= {"num_hidden_layers": 15, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
GEMMA4 |= {"global_head_dim": 256, "num_kv_shared_layers": 8, "use_double_wide_mlp": True, "sliding_window": 512}
GEMMA4 |= {"hidden_size_per_layer_input": 128, "vocab_size_per_layer_input": SHAPE["vocab_size"]}
MODELS = {"dense": DENSE, "experts": MOE, "glm-4.5": GLM, "starcoder2": STARCODER2, "gpt-neox": NEOX}
MODELS |= {"deepseek-v3": V3, "gemma-4": GEMMA4}
STORAGE: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "float32 arithmetic over bfloat16": {"dtype": "float32"},
}


def write_model(folder: Path, values: dict[str, Any]) -> ModelSpec:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    shapes = decoder_from_config(values, folder / "config.json").shapes()
    save_file(
        {name: torch.randn(shape).bfloat16() * 0.02 for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return load_model_spec(folder)


class Decodes:
    """Decode steps of one request, one token each."""

    def __init__(self, folder: Path, num_threads: int, settings: dict[str, Any], *, by_torch: bool = False) -> None:
        config = EngineConfig(model=str(folder), num_kv_blocks=128, num_threads=num_threads, **settings)
        fuses = "pagemill_engine.sizing.compute.can_fuse"
        with patch(fuses, lambda decoder: not by_torch and can_fuse(decoder)):
            self._runner = create_runner(config, lambda phase, detail: None)
        self._config, self.compute = config, self._runner.info.compute
        self.weight_bytes = self._runner.info.weight_bytes

    def seconds(self, num_tokens: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the mean seconds of a step; the prompt's step and the first two decodes do not count."""
        core = EngineCore(self._config, self._runner)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + 3, ignore_eos=True)
        core.add(GenerateRequest(request_id="r", model="m", prompt_token_ids=[1, 2, 3], sampling=sampling))
        for _ in range(3):
            core.step()
        start, count = clock(), 0
        while core.has_work:
            core.step()
            count += 1
        return (clock() - start) / count


def beside_torch(args: argparse.Namespace) -> None:
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.beside_torch:
            write_model(Path(folder) / name, MODELS[name])
            for storage, settings in STORAGE.items():
                both = [
                    Decodes(Path(folder) / name, args.threads, settings, by_torch=by_torch)
                    for by_torch in (False, True)
                ]
                pairs = [[each.seconds(args.tokens) for each in both] for _ in range(args.runs)]
                native, torchs = (median(column) * 1000 for column in zip(*pairs, strict=True))
                ratio = median(other / own for own, other in pairs)
                figures[f"{name} {storage}"] = ratio
                rows.append([storage, name, f"{native:.2f}", f"{torchs:.2f}", f"{ratio:.2f}"])
    emit("native layers", ["weights", "model", "native ms", "torch ms", "ratio"], rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--beside-torch", nargs="+", choices=MODELS, default=[], metavar="MODEL")
    args = parser.parse_args()
    if args.beside_torch:
        return beside_torch(args)
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        specs = {name: write_model(Path(folder) / name, each) for name, each in MODELS.items()}
        for storage, settings in STORAGE.items():
            decodes = {name: Decodes(Path(folder) / name, args.threads, settings) for name in specs}
            runs: dict[str, list[float]] = {name: [] for name in specs}
            for _ in range(args.runs):
                for name, each in decodes.items():
                    runs[name].append(each.seconds(args.tokens))
            share = {name: spec.num_read_parameters() / spec.num_parameters for name, spec in specs.items()}
            speed = {name: share[name] * decodes[name].weight_bytes / median(runs[name]) / 1e9 for name in specs}
            ratios[storage] = {name: speed[name] / speed["dense"] for name in specs}
            for name in specs:
                step_ms = median(runs[name]) * 1000
                rows.append([storage, name, f"{step_ms:.2f}", speed[name], f"{ratios[storage][name]:.2f}x"])
    columns = ["weights", "model", "step ms", "GB/s", "of dense"]
    emit("experts", columns, rows, {"ratios": ratios, "threads": args.threads})


if __name__ == "__main__":
    main()
