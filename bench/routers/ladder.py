"""Measures one contender: its cost when idle, then rising rates until it cannot sustain one.

A run is invalid if the generator sent too late, or if pods and generator used all of their core. Invalid runs are
repeated; if that does not help, the measurement ends without a verdict.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from peers.process import PeerFailed
from processes import tree_memory

from routers.catalogue import Router
from routers.stage import Cores, Running, Scene, Stage, stage, started

WARM_UP_RATE = 20.0
MAX_LAG_MS = 5.0
"""99th percentile of how late requests were sent."""
MAX_LOAD_SHARE = 0.95
"""Largest share of their cores that pods and generator may use together."""
MAX_TTFT_P99_MS = 100.0
"""A rate with a higher TTFT p99 is not sustained. Prefills take no time here, so all of it is queueing."""
MAX_BACKLOG_S = 0.5
"""Longest time from the last arrival to the last answer, in addition to the duration of an answer."""


class Size(NamedTuple):
    num_pods: int
    rates: tuple[float, ...]
    """Rates in requests per second, ascending."""
    seconds: float
    """Duration of one run; half as long is the warm-up."""
    idle_s: float = 4.0
    settle_s: float = 2.0
    """Seconds between the first answer and the load, for routers that register their pods one by one."""
    num_tries: int = 3
    num_prompt_tokens: int = 200
    climb_on: bool = False
    """Whether to continue with the next rate if a rate was not sustained."""

    @property
    def scene(self) -> Scene:
        usual = Scene(self.num_pods, 1, num_prompt_tokens=self.num_prompt_tokens)
        return usual._replace(max_streams=math.ceil(4 * max(self.rates) * usual.answer_s))


FULL = Size(100, (50, 100, 200, 300, 400, 500, 700, 1000, 1400), seconds=8.0)
SMOKE = Size(4, (20,), seconds=2.0, idle_s=1.0, settle_s=0.5, num_tries=1)


class Verdict(NamedTuple):
    valid: bool
    held: bool


def climb(router: Router | None, size: Size, where: Cores) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows with their values as they are measured, `idle` first. `None`: no router. Raises `PeerFailed`."""
    with stage(size.scene, where) as around, started(router, around) as running:
        time.sleep(size.settle_s)
        _check(around.load(running.ports, WARM_UP_RATE, seconds=size.seconds / 2))
        yield "idle", _idle(running, size.idle_s)
        for rate in size.rates:
            values = _run(around, running, rate, size)
            yield f"{rate:g}", values
            if not (values["held"] or size.climb_on):
                return


def judge(values: dict[str, Any], answer_s: float) -> Verdict:
    """Return whether a run is valid, and whether the router sustained the rate."""
    lagged = values["lag_ms"]["p99"] > MAX_LAG_MS or values["load_share"] > MAX_LOAD_SHARE
    complete = values["num_done"] == values["num_sent"]
    backlog_s = values["whole_s"] - values["sent_s"] - answer_s
    prompt = complete and values["ttft_ms"]["p99"] <= MAX_TTFT_P99_MS and backlog_s <= MAX_BACKLOG_S
    return Verdict(not lagged, prompt and not lagged)


def _idle(running: Running, seconds: float) -> dict[str, Any]:
    """Measure the cost of following idle pods."""
    if running.process is None:
        return {}
    before, start = running.cpu_s(), time.perf_counter()
    time.sleep(seconds)
    used = running.cpu_s() - before
    return {
        "cores": round(used / (time.perf_counter() - start), 4),
        "pss_mib": round(tree_memory(running.process.pid).pss_mib, 1),
    }


def _run(around: Stage, running: Running, rate: float, size: Size) -> dict[str, Any]:
    """Return the first valid try, or the last one."""
    for _ in range(size.num_tries):
        values = _measure(around, running, rate, size.seconds)
        verdict = judge(values, around.scene.answer_s)
        if verdict.valid:
            break
    return {**values, "lagged": not verdict.valid, "held": verdict.held}


def _measure(around: Stage, running: Running, rate: float, seconds: float) -> dict[str, Any]:
    start, before, load_before = time.perf_counter(), running.cpu_s(), around.cpu_s()
    report = around.load(running.ports, rate, seconds=seconds)
    used, load_used = running.cpu_s() - before, around.cpu_s() - load_before
    took_s = time.perf_counter() - start
    return {
        **report,
        "cpu_ms": used * 1000 / max(1, report["num_done"]),
        "router_share": used / took_s,
        "load_share": load_used / took_s / len(around.where.load),
    }


def _check(report: dict[str, Any]) -> None:
    if report["num_done"] < report["num_sent"]:
        failed = report["num_sent"] - report["num_done"]
        raise PeerFailed(f"{failed} of {report['num_sent']} requests failed: {json.dumps(report['causes'])[:160]}")
