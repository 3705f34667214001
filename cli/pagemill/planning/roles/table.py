"""Formats forecasts of separate roles: rows for the table of `comparison`, remarks below it, and JSON."""

from __future__ import annotations

import math
from typing import Any

from pagemill.planning import report
from pagemill.planning.roles.pairs import PairAnswer
from pagemill.planning.roles.roles import Role
from pagemill_protocol.report.prediction import Prediction

MIXED = "mixed"
"""The roles of replicas as Pagemill serves them."""
ROLES = "prefill + decode"
NOTE = (
    f"{ROLES} is a forecast: Pagemill computes prompts and decodes in every replica ({MIXED}) and does not serve "
    "separate roles yet, so no LLMDeployment describes them."
)


def name_of(pair: PairAnswer) -> str:
    return " + ".join(pair.devices)


def cells_of(pair: PairAnswer, concurrency: list[str], costs: list[str]) -> list[str]:
    """Return the cells from the number of replicas on; `concurrency` is that of the decode replica."""
    chosen = pair.forecast.chosen
    gpus = " + ".join(str(number or "-") for number in pair.gpus)
    rate = f"{pair.forecast.workload.requests_per_s:.3g}"
    if chosen is None:
        most = f"> {pair.forecast.most}"
        return [f"{most} + {most}", gpus, *concurrency, rate, "-", "-", "-", *costs]
    return [
        f"{chosen.prefill.replicas} + {chosen.decode.replicas}",
        gpus,
        *concurrency,
        rate,
        f"{chosen.prefill.utilization:.0%} + {chosen.decode.utilization:.0%}",
        report.milliseconds(chosen.latencies.ttft_ms),
        report.milliseconds(chosen.latencies.tpot_ms),
        *costs,
    ]


def remark_of(pair: PairAnswer) -> str:
    """Return what limits each role and what the transfer takes, or why no numbers of replicas suffice."""
    forecast = pair.forecast
    if forecast.chosen is None:
        return refusal_of(pair)
    prefill, decode = forecast.chosen.prefill, forecast.chosen.decode
    size = forecast.transfer_bytes / 1024**2
    return (
        f"a prefill replica serves up to {prefill.capacity:.3g} requests/s, limited by {prefill.limit}, and a decode "
        f"replica up to {decode.capacity:.3g}, limited by {decode.limit}; the KV cache of a prompt, {size:.1f} MiB, "
        f"takes {report.milliseconds(forecast.transfer_ms)} at {pair.gbit_per_s:g} Gbit/s"
    )


def refusal_of(pair: PairAnswer) -> str:
    """Return why no numbers of replicas suffice, with the remedy."""
    forecast, idle = pair.forecast, pair.forecast.idle
    within = report.within(pair.slo)
    if not pair.idle_meets:
        ttft, tpot, moved = (report.milliseconds(each) for each in (*_latencies(idle).values(), forecast.transfer_ms))
        return (
            f"No numbers of replicas serve this load{within}: even a request alone has TTFT {ttft}, of which {moved} "
            f"are the transfer of its KV cache, and TPOT {tpot}. Raise the SLO or --link-gbit-per-s, shorten the "
            "requests, or use faster devices or a smaller model."
        )
    return (
        f"Up to {forecast.most} replicas of each role cannot serve this load{within}: raise the SLO or maxReplicas, "
        "shorten the requests, or use faster replicas."
    )


def body_of(pair: PairAnswer) -> dict[str, Any]:
    """Return the JSON object that `docs/reference/plan.md` describes."""
    forecast = pair.forecast
    chosen = forecast.chosen
    cost = None if chosen is None else chosen.cost
    latencies = {"ttft_ms": None, "tpot_ms": None} if chosen is None else _latencies(chosen.latencies)
    return {
        "model": pair.prefill.label,
        "prefill": _role(pair, 0, None if chosen is None else chosen.prefill),
        "decode": _role(pair, 1, None if chosen is None else chosen.decode),
        "served": False,
        "workload": report.load_as_json(forecast.workload, forecast.workload.users),
        **latencies,
        "idle": _latencies(forecast.idle),
        "link": {
            "gbit_per_s": pair.gbit_per_s,
            "bytesPerRequest": forecast.transfer_bytes,
            "transfer_ms": forecast.transfer_ms,
            "utilization": None if chosen is None else chosen.link_utilization,
        },
        "cost": None if cost is None else cost._asdict(),
        "error": refusal_of(pair) if chosen is None else None,
    }


def _role(pair: PairAnswer, at: int, role: Role | None) -> dict[str, Any]:
    return {
        "accelerator": pair.devices[at],
        "gpus": pair.gpus[at],
        "replicas": None if role is None else role.replicas,
        "requestsPerSecond": None if role is None else role.capacity,
        "utilization": None if role is None else role.utilization,
        "limit": None if role is None else role.limit,
    }


def _latencies(found: Prediction) -> dict[str, float | None]:
    """Return both latencies; `None` is unbounded."""
    named = {"ttft_ms": found.ttft_ms, "tpot_ms": found.tpot_ms}
    return {name: value if math.isfinite(value) else None for name, value in named.items()}
