"""Measures LoRA adapters on this machine's CPUs: decodes with and without them, loads beside steps, and many adapters.

The model has the shape of a 1B Llama (`--layers` of its 16 layers) and repeated random bfloat16 weights; adapters of
rank 16 are on all linear layers of the attention and the MLP. Engines run in this process, and what is compared is run
in turns. The parts `embedded` and `first-tokens` take the embedded model: decodes, beside the bytes of its adapters,
and first tokens of a request whose adapter the last request had, or is on the host, or in its folder.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from adapter_replicas import write_adapter as write_adapter_of
from report import emit
from safetensors.torch import save_file
from workload import MODEL

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import LoadAdapter
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.starting.factory import create_runner
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

HIDDEN, MLP, VOCAB, KV = 2048, 8192, 128_256, 512
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
RANK, ROWS, ACTIVE, PROMPT = 16, 32, 16, 16
TOKENS = 40_000
"""Ids of prompts; all models have more."""


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return bfloat16 values, of which 65,536 are random."""
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()
    size = math.prod(shape)
    return block.repeat(-(-size // len(block)))[:size].reshape(shape)


def write_model(folder: Path, layers: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": values((VOCAB, HIDDEN), 0), "model.norm.weight": values((HIDDEN,), 1)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": values(shape, layer) for name, shape in SHAPES.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{at}{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors")


def write_adapter(folder: Path, layers: int, seed: int) -> None:
    folder.mkdir()
    modules = [name.rpartition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(layers):
        for name, (outs, ins) in SHAPES.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = values((RANK, ins), seed)
            tensors[f"{at}.lora_B.weight"] = values((outs, RANK), seed + 1)
    save_file(tensors, folder / "adapter_model.safetensors")


class Engine:
    def __init__(self, model: Path, **settings: Any) -> None:
        given = {"num_kv_blocks": 512, "max_num_seqs": ROWS, "max_model_len": 512, "max_lora_rank": RANK, **settings}
        config = EngineConfig(model=str(model), enable_prefix_caching=False, **given)
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        self._count = 0

    def add(self, digest: str, num_tokens: int) -> str:
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = [(self._count * 31 + at) % TOKENS for at in range(PROMPT)]
        name = f"r{self._count}"
        self.core.add(
            GenerateRequest(
                request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling, adapter_digest=digest
            )
        )
        return name

    def load(self, folder: Path) -> tuple[str, float]:
        assert self.core.adapters is not None
        loaded = self.core.adapters.load(folder)
        return loaded.digest, loaded.load_ms

    def step_s(self, digests: Sequence[str], num_steps: int, between: Any = None) -> list[float]:
        """Return the seconds of each decode with a row for each digest."""
        for digest in digests:
            self.add(digest, num_steps + 2)
        while self.core.load().num_tokens_waiting or self.core.load().num_requests_running < len(digests):
            self.core.step()
        times: list[float] = []
        while self.core.has_work:
            if between is not None:
                between()
            before_s = time.perf_counter()
            outputs = self.core.step().outputs
            if len(outputs) == len(digests) and len(times) < num_steps:
                times.append(time.perf_counter() - before_s)
        return times

    def first_token_s(self, digest: str) -> float:
        """Run a request of two tokens; return the time until its first one."""
        began_s, first_s = time.perf_counter(), 0.0
        self.add(digest, 2)
        while self.core.has_work:
            if self.core.step().outputs and not first_s:
                first_s = time.perf_counter() - began_s
        return first_s


def decodes(model: Path, folders: list[Path], rounds: int, steps: int) -> dict[str, float]:
    plain = Engine(model)
    serving = Engine(model, enable_lora=True, max_loras=ACTIVE)
    loads = [serving.load(folder) for folder in folders[:ACTIVE]]
    mixed = [loads[row % ACTIVE][0] for row in range(ROWS)]
    medians: dict[str, list[float]] = {"without": [], "none in the batch": [], "16 in the batch": []}
    for _ in range(rounds):
        medians["without"].append(statistics.median(plain.step_s([""] * ROWS, steps)))
        medians["none in the batch"].append(statistics.median(serving.step_s([""] * ROWS, steps)))
        medians["16 in the batch"].append(statistics.median(serving.step_s(mixed, steps)))
    result = {f"step_ms {name}": round(min(each) * 1000, 2) for name, each in medians.items()}
    for name, each in medians.items():
        ratio = statistics.median(one / other for one, other in zip(medians["without"], each, strict=True))
        result[f"speed {name}"] = round(ratio, 3)
    assert serving.core.adapters is not None
    result["load_ms"] = round(statistics.median(load_ms for _, load_ms in loads), 1)
    num_bytes = serving.core.adapters.store.num_bytes
    result["adapter_mib"] = round(num_bytes / ACTIVE / 2**20, 1)
    result["adapters_of_weights"] = round(num_bytes / serving.core.runner.info.weight_bytes, 2)
    return result


def first_tokens(model: Path, folders: list[Path], rounds: int) -> dict[str, float]:
    """Return the times to the first token of requests alone, by where the adapter is. One has a slot, two are kept."""
    engine = Engine(model, enable_lora=True, max_loras=1, max_cpu_loras=2)
    digests = [engine.load(folder)[0] for folder in folders[:3]]
    turns = {"in its slot": digests[:1], "on the host": digests[:2], "in its folder": digests}
    assert engine.core.adapters is not None
    store, result = engine.core.adapters.store, dict[str, float]()
    times: dict[str, list[float]] = {name: [] for name in turns}
    loads = dict.fromkeys(turns, 0)
    for _ in range(rounds):
        for name, asked in turns.items():  # in turns, as others may use the machine
            for digest in asked * 2:
                engine.first_token_s(digest)
            before = store.num_loads
            times[name] += [engine.first_token_s(asked[turn % len(asked)]) for turn in range(3)]
            loads[name] += store.num_loads - before
    for name in turns:
        result[f"first_token_ms {name}"] = round(statistics.median(times[name]) * 1000, 1)
        result[f"loads {name}"] = loads[name]
    return result


def gaps(model: Path, folders: list[Path], rounds: int, steps: int) -> dict[str, float]:
    """Return the 99th percentile of decodes with loads beside them, one after another, and without."""
    engine = Engine(model, enable_lora=True, max_loras=1, max_cpu_loras=2)
    adapters = engine.core.adapters
    assert adapters is not None
    found: dict[bool, list[float]] = {False: [], True: []}
    number = 0

    def keep_loading() -> None:
        nonlocal number
        if not adapters.has_work:
            number += 1
            adapters.begin(LoadAdapter(number, str(folders[number % len(folders)])))

    for _ in range(rounds):
        for loads in (False, True):
            found[loads] += engine.step_s([""] * 8, steps, keep_loading if loads else None)
            adapters.take_answers()
    p99 = {loads: sorted(times)[int(len(times) * 0.99)] * 1000 for loads, times in found.items()}
    return {"p99_ms": round(p99[False], 2), "p99_ms_with_loads": round(p99[True], 2), "loads": number}


def zipf(model: Path, folders: list[Path], num_requests: int, slots: int, kept: int) -> dict[str, float]:
    """Run requests for adapters by Zipf's law, 32 at a time, and as many for the model alone."""
    engine = Engine(model, enable_lora=True, max_loras=slots, max_cpu_loras=kept)
    digests = [engine.load(folder)[0] for folder in folders]
    draw = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(len(digests))]
    asked = draw.choices(digests, weights, k=num_requests)
    assert engine.core.adapters is not None
    store = engine.core.adapters.store
    result: dict[str, float] = {}
    for name, wanted in (("adapters", asked), ("base", [""] * num_requests)):
        before, started_s, added = store.num_loads, time.perf_counter(), {}
        firsts: dict[str, float] = {}
        waiting, num_running = list(wanted), 0
        while waiting or engine.core.has_work:
            while waiting and num_running < ROWS:
                added[engine.add(waiting.pop(0), 32)] = time.perf_counter()
                num_running += 1
            for out in engine.core.step().outputs:
                assert out.error is None, out.error
                firsts.setdefault(out.request_id, time.perf_counter())
                num_running -= out.finish_reason is not None
        ttft = sorted(firsts[each] - added[each] for each in added)
        result |= {
            f"{name}_tokens_per_s": round(num_requests * 32 / (time.perf_counter() - started_s), 1),
            f"{name}_ttft_p50_ms": round(ttft[len(ttft) // 2] * 1000, 1),
            f"{name}_ttft_p99_ms": round(ttft[int(len(ttft) * 0.99)] * 1000, 1),
            f"{name}_loads": store.num_loads - before,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--parts", nargs="+", default=["decodes", "gaps", "zipf"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        folders = [Path(name) / f"adapter-{index}" for index in range(max(ACTIVE, asked.adapters))]
        if {"decodes", "gaps", "zipf"} & set(asked.parts):
            write_model(model, asked.layers)
            for index, folder in enumerate(folders):
                write_adapter(folder, asked.layers, index)
        result: dict[str, Any] = {}
        if "decodes" in asked.parts:
            result |= decodes(model, folders, asked.rounds, asked.steps)
        if "gaps" in asked.parts:
            result |= gaps(model, folders, asked.rounds, asked.steps * 4)
        if "zipf" in asked.parts:
            result |= zipf(model, folders, 2 * asked.adapters, ACTIVE, 2 * ACTIVE)
        if {"embedded", "first-tokens"} & set(asked.parts):
            model = resolve_source(MODEL, field="model")
            folders = [Path(name) / f"embedded-{index}" for index in range(ACTIVE)]
            for index, folder in enumerate(folders):
                write_adapter_of(folder, load_model_spec(model).decoder, index)
        if "embedded" in asked.parts:
            result |= decodes(model, folders, asked.rounds, asked.steps)
        if "first-tokens" in asked.parts:
            result |= first_tokens(model, folders, asked.rounds)
        rows = [[name, value] for name, value in result.items()]
        emit("lora", ["what", "figure"], rows, {"layers": asked.layers, **result})


if __name__ == "__main__":
    main()
