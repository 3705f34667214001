"""What routing itself costs: a hundred pods with 8,192 prefix granules each, in one gateway.

Memory of the index, time to take a frame of changes, time of one decision (a prompt whose first half is cached on some
pods), and the time to hash a long conversation at first and when it has grown by one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import tracemalloc
from collections.abc import Callable

from report import emit, median

from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.interface import Ask, HashScheme, Target
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.relay.prompt_hashes import PromptHashes
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.state import Digests, EngineLoad, StateFrame, StepTimeParams

NUM_GRANULES = 8192
FRAME_CHANGES = 64
"""Granules that one frame of a busy pod adds, and as many that it removes."""
PROMPT_GRANULES = 32
STEP_TIME = StepTimeParams(knots_tokens=[1, 64, 512, 2048], knot_ms=[6.0, 8.0, 22.0, 80.0])
Rows = list[tuple[str, float]]


def frame_of(draw: random.Random, sequence: int, added: list[bytes], removed: list[bytes]) -> StateFrame:
    return StateFrame(
        sequence=sequence,
        snapshot=sequence == 1,
        load=EngineLoad(
            num_blocks_total=32768,
            num_blocks_free=20000,
            num_blocks_active=12000,
            num_requests_running=draw.randint(1, 40),
            num_tokens_running=draw.randint(1000, 40_000),
            num_tokens_waiting=draw.randint(0, 4000),
        ),
        step_time=STEP_TIME,
        digests=Digests(weights="w", tokenizer_bundle="t", kv_dtype="k"),
        max_model_len=131_072,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        prefixes_added=added,
        prefixes_removed=removed,
    )


def measure(num_pods: int) -> Rows:
    draw = random.Random(1)
    brain = LocalBrain(GatewayConfig(state_stale_after_s=1e9), rng=draw)
    names = [f"pod-{number}" for number in range(num_pods)]
    endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in names]
    brain.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    shared = [draw.randbytes(16) for _ in range(PROMPT_GRANULES)]
    tracemalloc.start()
    for number, name in enumerate(names):
        own = [draw.randbytes(16) for _ in range(NUM_GRANULES - PROMPT_GRANULES)]
        brain.observe(name, frame_of(draw, 1, own + shared[: number % PROMPT_GRANULES], []))
    memory_mb = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    frames = [(name, frame_of(draw, 2, [draw.randbytes(16) for _ in range(FRAME_CHANGES)], [])) for name in names]
    frames += [(name, frame_of(draw, 3, [], frame.prefixes_added)) for name, frame in frames]
    frame_us = timed(lambda: [brain.observe(name, frame) for name, frame in frames]) / len(frames) * 1e6
    target, ask = brain.resolve("m"), Ask(PROMPT_GRANULES * 64, tuple(shared), 64)
    decision_us = asyncio.run(time_decisions(brain, target, ask)) * 1e6
    return [
        ("index and reports, MB", memory_mb),
        (f"frame with {FRAME_CHANGES} changes, us", frame_us),
        ("decision, us", decision_us),
        *hashing(),
    ]


async def time_decisions(brain: LocalBrain, target: Target, ask: Ask, count: int = 300) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        choice = await brain.choose(target, frozenset(), ask)
        brain.started(choice)
        brain.finished(choice, 100)
        times.append(time.perf_counter() - started)
    return median(times)


def hashing() -> Rows:
    scheme, hashes = HashScheme("w", "k", 16, 4), PromptHashes(65536)
    conversation = [number * 7919 % 32000 for number in range(100_000)]
    first_ms = timed(lambda: hashes.hashes(scheme, "", conversation)) * 1e3
    conversation += range(500)
    grown_ms = timed(lambda: hashes.hashes(scheme, "", conversation)) * 1e3
    return [("hashing 100,000 tokens, ms", first_ms), ("and again with 500 more, ms", grown_ms)]


def timed(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100)
    args = parser.parse_args()
    rows = measure(args.pods)
    result = {name: round(value, 3) for name, value in rows}
    emit("routing_cost", ["what", "value"], rows, {"pods": args.pods, "figures": result})


if __name__ == "__main__":
    main()
