"""Measures quality of quantized weights and caches: perplexity on a fixed text, and distance of predictions to float32.

The embedded model exists only in 4 bits, so its values as float32 are the reference. They lie on the grid that 4-bit
quantization would find again; to learn what quantization costs an unquantized model, its units are permuted first
(`renumbered_model`), which keeps the function and mixes the groups.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint import llama_config
from report import ROOT, emit
from safetensors.torch import save_file
from torch import Tensor
from workload import MODEL

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.step import AdmittedSequence, HeldBlocks, StepPlan
from pagemill_execution.weights.opening import open_weights
from pagemill_kernels.arrays import Array
from pagemill_kernels.torch_arrays import from_torch, to_torch
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.sampling import SamplingParams

TEXT = ROOT / "bench" / "quality.txt"
CHUNK = 128
"""Tokens of a prefill step: later chunks read what earlier ones wrote to the KV cache."""
ROWS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "float32, KV bfloat16": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "float32, KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
"""`bfloat16` runs by default only if the processor has arithmetic for it; otherwise it takes many minutes."""
FILE_ROWS: dict[str, dict[str, Any]] = {
    "the file's own codes": {"dtype": "float32"},
    "the file's own codes, activations of 16 bits": {"dtype": "auto"},
}


def renumbered_model(path: Path, folder: Path) -> None:
    """Write `path` as a float32 safetensors folder with permuted hidden and intermediate units.

    Permuting the outputs of one layer and the inputs of the next alike changes only the order of sums.
    """
    spec, weights = load_model_spec(path), open_weights(path)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randperm(spec.hidden_size, generator=generator)
    inner = torch.randperm(spec.intermediate_size, generator=generator)
    heads = head_order(spec, torch.randperm(spec.head_dim, generator=generator))
    tensors = {}
    for name, shape in weights.shapes.items():
        tensor = torch.empty(shape)
        weights.read_into(name, from_torch(tensor))
        tensors[name] = renumbered(name, tensor, hidden, inner, heads)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(llama_config(spec)))


def renumbered(name: str, tensor: Tensor, hidden: Tensor, inner: Tensor, heads: tuple[Tensor, Tensor]) -> Tensor:
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight")):
        return tensor[:, hidden].contiguous()
    if name.endswith("v_proj.weight"):
        return tensor[heads[0]][:, hidden].contiguous()
    if name.endswith("o_proj.weight"):
        return tensor[hidden][:, heads[1]].contiguous()
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return tensor[inner][:, hidden].contiguous()
    if name.endswith("down_proj.weight"):
        return tensor[hidden][:, inner].contiguous()
    return tensor[hidden].contiguous()  # norms


def head_order(spec: ModelSpec, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new order of the value projection's outputs and the output projection's inputs, the same in all
    heads.
    """
    starts = torch.arange(spec.num_heads)[:, None] * spec.head_dim
    rows = (starts + order).flatten()
    return rows[: spec.num_kv_heads * spec.head_dim], rows


def windows(token_ids: list[int], size: int) -> Iterator[list[int]]:
    """Yield windows of one size; a shorter rest is dropped."""
    for start in range(0, len(token_ids) - size + 1, size):
        yield token_ids[start : start + size]


class _Keeping:
    """A model that keeps its outputs."""

    def __init__(self, model: Any, kept: list[Array]) -> None:
        self._model, self._kept = model, kept

    def hidden(self, *inputs: Any) -> Array:
        hidden: Array = self._model.hidden(*inputs)
        self._kept.append(hidden)
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def predictions(runner: Any, window: list[int]) -> Tensor:
    """Return the log probabilities [tokens - 1, vocabulary] after each token but the last, over the paged cache."""
    kept: list[Array] = []
    model = runner.model
    runner.model = _Keeping(model, kept)
    num_blocks = -(-len(window) // runner.info.block_size)
    row = AdmittedSequence(
        request_id="window",
        token_ids=window,
        tables=[HeldBlocks(0, list(range(num_blocks)))],
        num_prompt_tokens=len(window),
        num_computed_tokens=0,
        sampling=SamplingParams(temperature=0, max_tokens=1),
        choice=0,
        seed=0,
    )
    try:
        for start in range(0, len(window), CHUNK):
            count = min(CHUNK, len(window) - start)
            last = start + count == len(window)
            samples, admitted = ({"window"} if last else set()), ([] if start else [row])
            plan = StepPlan(step=start, num_scheduled_tokens={"window": count}, samples=samples, admitted=admitted)
            runner.wait(runner.launch(plan))
        runner.wait(runner.launch(StepPlan(step=-1, num_scheduled_tokens={}, samples=set(), released=["window"])))
    finally:
        runner.model = model
    return to_torch(runner.model.logits(np.concatenate(kept)[:-1])).log_softmax(-1)


def measure(model: str, token_ids: list[int], size: int, settings: dict[str, Any], reference: list[Tensor]) -> Any:
    """Return perplexity and distance from `reference`, which the first call fills."""
    num_blocks = -(-size // 16) + 1
    config = EngineConfig(model=model, num_kv_blocks=num_blocks, max_model_len=size, max_num_seqs=1, **settings)
    runner = create_runner(config, lambda phase, detail: None)
    nats, divergence, same, count = 0.0, 0.0, 0, 0
    for index, window in enumerate(windows(token_ids, size)):
        predicted = predictions(runner, window)
        if len(reference) == index:
            reference.append(predicted)
        expected = reference[index]
        nats -= float(predicted.gather(1, torch.tensor(window[1:])[:, None]).double().sum())
        divergence += float((expected.exp() * (expected - predicted)).double().sum())
        same += int((expected.argmax(-1) == predicted.argmax(-1)).sum())
        count += len(predicted)
    result = {
        "perplexity": math.exp(nats / count),
        "divergence_nats": divergence / count,
        "same_first_percent": 100 * same / count,
        "weight_mib": runner.info.weight_bytes / 2**20,
        "kv_bytes_per_token": runner.info.kv_bytes_per_token,
        "tokens": count,
    }
    runner.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, default=512, help="number of tokens of a window")
    slow = set() if torch.cpu._is_avx512_bf16_supported() else {"bfloat16"}
    every = [*ROWS, *FILE_ROWS]
    parser.add_argument("--rows", nargs="+", default=[row for row in every if row not in slow], choices=every)
    args = parser.parse_args()
    path = resolve_source(MODEL)
    token_ids = Tokenizer(load_bundle(path)).encode(TEXT.read_text())
    results: dict[str, Any] = {}
    reference: list[Tensor] = []
    with tempfile.TemporaryDirectory() as name:
        renumbered_model(path, Path(name))
        for row in dict.fromkeys(["float32", *args.rows]):
            source, settings = (MODEL, FILE_ROWS[row]) if row in FILE_ROWS else (name, ROWS[row])
            results[row] = measure(source, token_ids, args.window, settings, reference)
    base = results["float32"]["perplexity"]
    table = [
        [
            row,
            each["perplexity"],
            f"{100 * (each['perplexity'] / base - 1):+.2f} %",
            f"{each['divergence_nats']:.5f}",
            each["same_first_percent"],
            each["weight_mib"],
            each["kv_bytes_per_token"],
        ]
        for row, each in results.items()
    ]
    columns = ["", "perplexity", "change", "KL nats", "same first %", "weights MiB", "KV bytes/token"]
    emit("quality", columns, table, {"window": args.window, "results": results})


if __name__ == "__main__":
    main()
