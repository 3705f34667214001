"""Compares decodes of mixtures of experts, families with layer norms, or hybrids, with a Llama that reads about as many
bytes.

Random weights, all models in one process and alternating; the median of the runs counts. Goal: at least 0.8 of the
Llama's share of the memory bandwidth. What a hybrid reads and writes are its weights, each state once a step,
and their next versions once a block. With `--beside-torch`, each model is compared with itself where torch calls its
operations one by one.
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
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.decoders.native.layers import can_fuse
from pagemill_execution.starting.factory import create_runner
from pagemill_kernels.huge_pages import collapse_when_idle
from pagemill_models.declaration.caches import StateSpec
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
# Qwen3.5's shape of 0.8B with a smaller vocabulary, and other kinds of states in the same sizes.
SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "vocab_size": 32_000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
QWEN: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], **SMALL, "linear_num_key_heads": 16}
QWEN |= {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
BAMBA: dict[str, Any] = {"architectures": ["BambaForCausalLM"], **SMALL, "attn_layer_indices": [5, 11, 17, 23]}
BAMBA |= {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
LFM: dict[str, Any] = {"architectures": ["Lfm2ForCausalLM"], **SMALL, "block_auto_adjust_ff_dim": False}
LFM |= {"full_attn_idxs": [3, 7, 11, 15, 19, 23]}
HYBRIDS = {
    "dense": {"architectures": ["LlamaForCausalLM"], **SMALL},
    "qwen3.5": QWEN,
    "bamba": BAMBA,
    "lfm2": LFM,
}
BLOCK_SIZE = 16
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


def state_bytes(spec: ModelSpec) -> float:
    """Return the bytes of states that a decode of one request reads and writes."""
    kept = [each for _, each in spec.decoder.caches() if isinstance(each, StateSpec)]
    return 4 * sum(each.num_values for each in kept) * (1 + 1 / BLOCK_SIZE)


class Decodes:
    """Decode steps of several requests, one token each."""

    def __init__(self, folder: Path, num_threads: int, settings: dict[str, Any], *, by_torch: bool = False) -> None:
        config = EngineConfig(
            model=str(folder), max_num_seqs=8, max_model_len=256, block_size=BLOCK_SIZE, num_threads=num_threads,
            enable_prefix_caching=False, **settings,
        )  # fmt: skip
        fuses = "pagemill_execution.sizing.compute.can_fuse"
        with patch(fuses, lambda decoder: not by_torch and can_fuse(decoder)):
            self._runner = create_runner(config, lambda phase, detail: None)
        self._core, self._num_requests = EngineCore(config, self._runner), 0
        self.compute, self.weight_bytes = self._runner.info.compute, self._runner.info.weight_bytes

    def seconds(self, num_tokens: int, size: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the mean seconds of a step; the prompts' step and the first two decodes do not count."""
        core = self._core
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens + 3, ignore_eos=True)
        for index in range(size):
            self._num_requests += 1
            name, prompt = f"r{self._num_requests}", [1, 2, 3 + index]
            core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling))
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
            write_model(Path(folder) / name, (HYBRIDS | MODELS)[name])
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
    parser.add_argument("--hybrids", action="store_true", help="hybrids in place of the others")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--weights", choices=STORAGE, nargs="+", default=list(STORAGE))
    parser.add_argument("--beside-torch", nargs="+", choices=MODELS | HYBRIDS, default=[], metavar="MODEL")
    args = parser.parse_args()
    if args.beside_torch:
        return beside_torch(args)
    rows, ratios = [], dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        models = HYBRIDS if args.hybrids else MODELS
        specs = {name: write_model(Path(folder) / name, each) for name, each in models.items()}
        share = {name: spec.num_read_parameters() / spec.num_parameters for name, spec in specs.items()}
        for storage in args.weights:
            decodes = {name: Decodes(Path(folder) / name, args.threads, STORAGE[storage]) for name in specs}
            collapse_when_idle().join()  # into huge pages, as in an engine that has been up for a while
            for size in args.batches:
                runs: dict[str, list[float]] = {name: [] for name in specs}
                for _ in range(args.runs):
                    for name, each in decodes.items():
                        runs[name].append(each.seconds(args.tokens, size))
                step_bytes = {
                    name: share[name] * decodes[name].weight_bytes + size * state_bytes(spec)
                    for name, spec in specs.items()
                }
                speed = {name: step_bytes[name] / median(runs[name]) / 1e9 for name in specs}
                work = f"{storage}, {size} requests"
                ratios[work] = {name: speed[name] / speed["dense"] for name in specs}
                for name in specs:
                    step_ms = median(runs[name]) * 1000
                    rows.append([work, name, f"{step_ms:.2f}", speed[name], f"{ratios[work][name]:.2f}x"])
    columns = ["weights", "model", "step ms", "GB/s", "of dense"]
    emit("experts", columns, rows, {"ratios": ratios, "threads": args.threads})


if __name__ == "__main__":
    main()
