"""Formats the results of simulations as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pagemill.columns import columns
from pagemill.planning.replica import PlannedReplica
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan
from pagemill_simulator.fleet.figures import Figures, Quantiles
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.workloads.request import Workload

HEAD = ["POLICY", "TTFT P50", "P95", "P99", "TPOT P50", "P95", "P99"]
COUNTS = ["POD-SECONDS", "MAX PODS", "UPS", "DOWNS", "FLAPS", "REFUSED", "LOST"]
COSTS = ["COST", "PER 1M TOKENS"]


class Simulated(NamedTuple):
    """The results of all policies on one device."""

    replica: PlannedReplica
    settings: FleetSettings
    figures: Sequence[Figures]
    price_per_hour: float | None
    """The price of one replica; `None` if unknown."""


class SimulatedCost(NamedTuple):
    total: float
    """The cost of all pods, each from its creation to its end."""
    per_million_tokens: float
    """The cost per million tokens of prompts and answers together."""


def as_json(plan: Plan, workload: Workload, slo: Slo, simulated: Sequence[Simulated]) -> str:
    """Return the JSON that `docs/reference/plan.md` describes."""
    devices = [_device(each, workload) for each in simulated]
    body = {
        "deployment": plan.key,
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "requests": len(workload.requests),
            "promptTokens": sum(each.num_prompt_tokens for each in workload.requests),
            "outputTokens": sum(each.num_output_tokens for each in workload.requests),
            "durationSeconds": workload.duration_s,
        },
        "slo": msgspec.to_builtins(slo),
        **(devices[0] if len(devices) == 1 else {"devices": devices}),
    }
    return json.dumps(body, indent=1)


def _device(simulated: Simulated, workload: Workload) -> dict[str, Any]:
    replica, settings = simulated.replica, simulated.settings
    return {
        "bounds": settings.bounds._asdict(),
        "coldStart": msgspec.to_builtins(settings.cold_start),
        "replica": {
            "device": replica.device,
            "numBlocks": replica.shape.num_blocks,
            "blockSize": replica.shape.block_size,
            "maxNumSeqs": replica.shape.max_num_seqs,
            "maxNumBatchedTokens": replica.shape.max_step_tokens,
            "maxModelLen": replica.max_model_len,
        },
        "stepTimeFrom": replica.step_time_from,
        "stepTime": msgspec.to_builtins(replica.shape.step_time),
        "seed": settings.seed,
        "policies": [_policy(each, simulated, workload) for each in simulated.figures],
    }


def _policy(figures: Figures, simulated: Simulated, workload: Workload) -> dict[str, Any]:
    cost = _cost(figures, simulated, workload)
    return {**msgspec.to_builtins(figures), "cost": None if cost is None else cost._asdict()}


def _cost(figures: Figures, simulated: Simulated, workload: Workload) -> SimulatedCost | None:
    if simulated.price_per_hour is None:
        return None
    total = figures.pod_seconds / 3600 * simulated.price_per_hour
    tokens = sum(each.num_prompt_tokens + each.num_output_tokens for each in workload.requests)
    return SimulatedCost(total, total / max(1, tokens) * 1e6)


def as_table(plan: Plan, workload: Workload, slo: Slo, simulated: Sequence[Simulated]) -> str:
    aims, several = _slo_text(slo), len(simulated) > 1
    figures = [figures for each in simulated for figures in each.figures]
    has_slo = any(each.slo_attained is not None for each in figures)
    has_costs = any(each.price_per_hour is not None for each in simulated)
    head = [
        *(["ACCELERATOR"] if several else []),
        *HEAD,
        *(["SLO MET"] if has_slo else []),
        *COUNTS,
        *(COSTS if has_costs else []),
    ]
    rows = [
        [*([each.replica.device] if several else []), *_row(found, has_slo), *_costs(found, each, workload, has_costs)]
        for each in simulated
        for found in each.figures
    ]
    lines = [f"{plan.key}: {len(workload.requests):,} requests in {workload.duration_s:,.0f} s", ""]
    lines += [f"  {line}" for line in columns(_properties(workload, simulated))]
    lines += ["", *columns([head, *rows]), ""]
    lines.append(f"Times in ms{f'; the SLO is {aims}' if aims else ''}. {_method(figures)}")
    if any(each.num_refused for each in figures):
        lines.append("REFUSED: the queue was full, or a request waited longer than spec.routing.queue allows.")
    return printable("\n".join(lines))


def _properties(workload: Workload, simulated: Sequence[Simulated]) -> list[tuple[str, str]]:
    properties = [("traffic", workload.source)]
    for each in simulated:
        settings, device = each.settings, each.replica.device
        low, high = settings.bounds
        starts = f"a cold start takes about {settings.cold_start.total_s:.0f} s"
        properties += [
            ("replicas", f"{low} to {high} on {device}; {starts}"),
            ("step times", each.replica.step_time_from),
        ]
    return properties


def _costs(figures: Figures, simulated: Simulated, workload: Workload, has_costs: bool) -> list[str]:
    if not has_costs:
        return []
    cost = _cost(figures, simulated, workload)
    return ["-"] * len(COSTS) if cost is None else [f"{number:.4g}" for number in cost]


def _row(figures: Figures, has_slo: bool) -> list[str]:
    attained = figures.slo_attained
    return [
        figures.policy,
        *_quantiles(figures.ttft_ms),
        *_quantiles(figures.tpot_ms),
        *([] if not has_slo else ["-" if attained is None else f"{attained:.2%}"]),
        f"{figures.pod_seconds:,.0f}",
        str(figures.most_replicas),
        str(figures.num_scale_ups),
        str(figures.num_scale_downs),
        str(figures.num_flaps),
        str(figures.num_refused),
        str(figures.num_lost),
    ]


def _quantiles(quantiles: Quantiles) -> list[str]:
    values = (quantiles.p50, quantiles.p95, quantiles.p99)
    return ["-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values]


def _slo_text(slo: Slo) -> str:
    aims = [f"{name} {limit_ms:g} ms" for name, limit_ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if limit_ms]
    return " and ".join(aims)


def _method(figures: Sequence[Figures]) -> str:
    took_s = sum(each.wall_s for each in figures)
    is_exact = all(each.is_exact for each in figures)
    how = "with the engine's scheduler" if is_exact else "with --fast"
    return f"Simulated {how} in {took_s:.1f} s."
