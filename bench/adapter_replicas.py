"""Measures TTFT of requests for LoRA adapters on `pagemill up` with three replicas, for each routing policy.

Each replica has fewer places for adapters than there are adapters, so that the choice of the replica decides how often
adapters are loaded. `pagemill up` starts anew with the embedded model for each policy and round; the same streamed
completions arrive as a Poisson process, for adapters by Zipf's law. Of decisions with `Cost` the predicted time to the
first token is compared with the measured one, with and without a load. With `--alone` each request waits for the end of
the one before it, so that the difference of requests with and without a load is the load. Engines, gateway and clients
share the machine.
Exits with 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch
from local_replicas import Up, serving
from report import emit, median, progress
from safetensors.torch import save_file
from workload import MODEL

from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.linears import linears
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec

NAME, NUM_REPLICAS, RANK = "smollm2", 3, 16
ROLES = ("qkv", "output", "up", "down")
MAX_SHOWN = 256
DEPLOYMENT = """\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: {name}
spec:
  model:
    source: "{model}"
    name: {name}
    adapters: {adapters}
  engine: {{maxModelLen: 512, maxNumSeqs: 8, lora: {{maxLoras: 2, maxLoraRank: 16, maxCpuLoras: 2}}}}
  resources: {{gpus: 0}}
  replicas: 3
  routing: {{policy: {policy}}}
"""


class TimedDecision(NamedTuple):
    predicted_ms: float
    measured_ms: float
    load_ms: float
    """The part of the prediction that is the load of the adapter."""


def write_adapter(folder: Path, decoder: DecoderSpec, seed: int) -> None:
    """Write an adapter of all linear layers of attention and MLP, in PEFT's form."""
    folder.mkdir()
    generator, tensors, modules = torch.Generator().manual_seed(seed), dict[str, torch.Tensor](), set[str]()
    for use in linears(decoder):
        for part in use.spec.parts if use.role in ROLES else ():
            modules.add(part.name.rpartition(".")[2])
            for side, shape in (("A", (RANK, use.spec.in_features)), ("B", (part.rows, RANK))):
                values = torch.randn(shape, generator=generator).mul(0.02).bfloat16()
                tensors[f"base_model.model.{part.name}.lora_{side}.weight"] = values
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


async def ask(session: aiohttp.ClientSession, url: str, adapter: str, prompt: list[int]) -> float:
    """Return the milliseconds to the first event of an answer, or infinity for a failed request."""
    body = {"model": adapter, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "stream": True}
    began_s, ttft_ms = time.perf_counter(), float("inf")
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for _ in response.content.iter_any():
            if response.status == 200:
                ttft_ms = min(ttft_ms, (time.perf_counter() - began_s) * 1000)
    return ttft_ms


async def run(
    up: Up, url: str, names: Sequence[str], num: int, rate: float | None, seed: int
) -> tuple[list[float], Any]:
    """Return the times to the first event and the gateway's decisions. `rate`: None: each request alone."""
    draw, weights = random.Random(seed), [1 / (place + 1) for place in range(len(names))]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        asked = []
        for _ in range(num):
            prompt = [draw.randrange(100, 40_000) for _ in range(draw.randint(16, 48))]
            asked.append(asyncio.create_task(ask(session, url, draw.choices(names, weights)[0], prompt)))
            if rate is None:
                await asked[-1]
            else:
                await asyncio.sleep(draw.expovariate(rate))
        ttfts = await asyncio.gather(*asked)
        assert up.metrics_url is not None
        decisions = f"{up.metrics_url.removesuffix('/metrics')}/debug/decisions?limit={MAX_SHOWN}"
        async with session.get(decisions, headers={"Authorization": f"Bearer {up.control_token}"}) as response:
            return ttfts, (await response.json())["decisions"]


def decided(decisions: Sequence[dict[str, Any]]) -> list[TimedDecision]:
    return [
        TimedDecision(
            each["predicted_ttft_ms"], each["measured_ttft_ms"], each["candidates"][0]["terms"].get("adapter_ms", 0.0)
        )
        for each in decisions
        if each["measured_ttft_ms"] and each["predicted_ttft_ms"] is not None
    ]


def figures(ttfts: Sequence[float], found: Sequence[TimedDecision]) -> dict[str, float]:
    ordered = sorted(ttfts)
    result = {
        "ttft_p50_ms": ordered[len(ordered) // 2],
        "ttft_p95_ms": ordered[int(len(ordered) * 0.95)],
        "num_failed": sum(ttft == float("inf") for ttft in ttfts),
    }
    for kind, some in (
        ("load", [each for each in found if each.load_ms]),
        ("no_load", [each for each in found if not each.load_ms]),
    ):
        if some:
            result |= {
                f"{kind}_number": len(some),
                f"{kind}_predicted_p50_ms": median([each.predicted_ms for each in some]),
                f"{kind}_measured_p50_ms": median([each.measured_ms for each in some]),
                f"{kind}_error_p50": median([abs(each.predicted_ms / each.measured_ms - 1) for each in some]),
            }
            result[f"{kind}_of_load_p50_ms"] = median([each.load_ms for each in some])
    if "load_number" in result and "no_load_number" in result:
        result["load_adds_p50_ms"] = result["load_measured_p50_ms"] - result["no_load_measured_p50_ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["LeastRequest", "Cost"])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--alone", action="store_true", help="one request at a time")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    decoder = load_model_spec(resolve_source(MODEL, field="model")).decoder
    results: dict[str, list[dict[str, float]]] = {policy: [] for policy in args.policies}
    with tempfile.TemporaryDirectory() as at:
        names = [f"adapter-{index}" for index in range(args.adapters)]
        for index, name in enumerate(names):
            write_adapter(Path(at) / name, decoder, index)
        listed = json.dumps([{"name": name, "source": f"file://{at}/{name}"} for name in names])
        for number in range(args.rounds):
            for policy in args.policies:
                document = DEPLOYMENT.format(name=NAME, model=MODEL, adapters=listed, policy=policy)
                with serving(document, NUM_REPLICAS) as (up, url):
                    rate = None if args.alone else args.rate
                    ttfts, decisions = asyncio.run(run(up, url, names, args.requests, rate, number))
                results[policy].append(figures(ttfts, decided(decisions)))
                progress(f"{policy}, round {number}: {results[policy][-1]}")
    rows = [[policy, each["ttft_p50_ms"], each["ttft_p95_ms"]] for policy, found in results.items() for each in found]
    emit("adapter_replicas", ["policy", "TTFT p50 ms", "p95"], rows, {"policies": results})
    if any(each["num_failed"] for found in results.values() for each in found):
        raise SystemExit("requests failed")


if __name__ == "__main__":
    main()
