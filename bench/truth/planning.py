"""`pagemill plan` compared with the real engine: the same requests per second of one length, predicted and served.

The plan measures an engine of its own, as for a user; it gets nothing that the replayed engine has learned. The plan's
`requestsPerSecond` of a replica is compared with what is served at a higher rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from peers.process import PeerFailed
from workload import MODEL as SOURCE

from pagemill_simulator.workloads.request import SimRequest
from pagemill_simulator.workloads.shapes import Steady
from truth.compare import PERCENTS, Comparison, Latencies
from truth.generator import Answer, latencies
from truth.site import MAX_MODEL_LEN, THREADS

PROMPT_TOKENS, OUTPUT_TOKENS = 160, 48
OVERLOAD = 1.4
"""Multiple of the planned rate at which the engine always has work."""
OVERLOAD_S = 40.0
FULL_AFTER_S = 15.0
"""Seconds after which nearly as many requests run as the engine has sequence slots."""
MEASURE_S = 20
TIMEOUT_S = 180.0
DEPLOYMENT = f"""\
apiVersion: pagemill.dev/v1beta1
kind: LLMDeployment
metadata:
  name: measured
spec:
  model: {{source: "{SOURCE}"}}
  engine: {{maxModelLen: {MAX_MODEL_LEN}}}
  resources: {{gpus: 0, cpu: {THREADS}}}
  replicas: 1
"""

Replay = Callable[[str, list[SimRequest]], list[Answer]]
"""Plays requests; its prompts differ from those of any other name."""


class Planned(NamedTuple):
    rate: float
    """Requests per second."""
    found: list[Comparison]


def compare_plan(folder: Path, replay: Replay, share: float, seconds: float, seed: int) -> Planned:
    """Compare the plan with the engine at `share` of the load that the plan allows."""
    (folder / "plan.yaml").write_text(DEPLOYMENT)
    first = _plan(folder, 1.0, 50)
    (folder / "fit.json").write_text(json.dumps(first))
    held: float = first["replica"]["requestsPerSecond"]
    rate = round(share * held, 2)
    plans = [_plan(folder, rate, percent, "--fit", str(folder / "fit.json")) for percent in PERCENTS]
    found = latencies(replay("load", _steady(rate, seconds, seed)))
    crowded = replay("overload", _steady(OVERLOAD * held, OVERLOAD_S, seed + 1))
    served = sum(FULL_AFTER_S <= each.end_s < OVERLOAD_S for each in crowded) / (OVERLOAD_S - FULL_AFTER_S)
    return Planned(rate, [*_latencies(plans, found), Comparison("held, requests/s", [served], held)])


def _latencies(plans: list[dict[str, Any]], found: Latencies) -> list[Comparison]:
    rows = []
    measured = found.quantiles()
    for percent, plan in zip(PERCENTS, plans, strict=True):
        chosen = next(each for each in plan["candidates"] if each["replicas"] == 1)
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
            there = [measured[f"{name} p{percent}"]]
            rows.append(Comparison(f"{name} p{percent}, simulated", there, plan["simulated"][key]))
            rows.append(Comparison(f"{name} p{percent}, predicted", there, chosen[key]))
    return rows


def _plan(folder: Path, rate: float, percent: int, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pagemill", "plan", "-f", str(folder / "plan.yaml"), "-o", "json"]
    argv += ["--rps", str(rate), "--input", str(PROMPT_TOKENS), "--output", str(OUTPUT_TOKENS)]
    argv += ["--percentile", str(percent), "--measure-s", str(MEASURE_S), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise PeerFailed(f"`pagemill plan` ended with {done.returncode}: {done.stderr[-300:]}")
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def _steady(rate: float, seconds: float, seed: int) -> list[SimRequest]:
    lengths: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    return Steady(rate=rate, duration_s=seconds, prompt_sigma=0.0, output_sigma=0.0, **lengths).requests(seed)
