"""The results of simulations as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from pagemill.columns import columns
from pagemill.planning.replica import Replica
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan
from pagemill_simulator.fleet.figures import Figures, Quantiles
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.workloads.request import Workload

HEAD = ["POLICY", "TTFT P50", "P95", "P99", "TPOT P50", "P95", "P99"]
COSTS = ["POD-SECONDS", "MOST", "UPS", "DOWNS", "FLAPS", "REFUSED", "LOST"]


def as_json(
    plan: Plan, replica: Replica, workload: Workload, settings: FleetSettings, slo: Slo, figures: Sequence[Figures]
) -> str:
    requests = workload.requests
    body = {
        "deployment": plan.key,
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "requests": len(requests),
            "promptTokens": sum(each.num_prompt_tokens for each in requests),
            "outputTokens": sum(each.num_output_tokens for each in requests),
            "durationSeconds": workload.duration_s,
        },
        "slo": msgspec.to_builtins(slo),
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
        "policies": [msgspec.to_builtins(each) for each in figures],
    }
    return json.dumps(body, indent=1)


def as_table(
    plan: Plan, replica: Replica, workload: Workload, settings: FleetSettings, slo: Slo, figures: Sequence[Figures]
) -> str:
    low, high = settings.bounds
    about = [
        ("traffic", workload.source),
        ("replicas", f"{low} to {high} of {replica.device}; a start takes about {settings.cold_start.total_s:.0f} s"),
        ("step times", replica.step_time_from),
    ]
    aims = _aims(slo)
    has_slo = any(each.slo_attained is not None for each in figures)
    head = [*HEAD, *(["SLO MET"] if has_slo else []), *COSTS]
    lines = [f"{plan.key}: {len(workload.requests):,} requests in {workload.duration_s:,.0f} s", ""]
    lines += [f"  {line}" for line in columns(about)]
    lines += ["", *columns([head, *(_row(each, has_slo) for each in figures)]), ""]
    lines.append(f"Times in ms{f'; the SLO is {aims}' if aims else ''}. {_how(figures)}")
    return printable("\n".join(lines))


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


def _aims(slo: Slo) -> str:
    aims = [f"{name} {limit_ms:g} ms" for name, limit_ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if limit_ms]
    return " and ".join(aims)


def _how(figures: Sequence[Figures]) -> str:
    took_s = sum(each.wall_s for each in figures)
    is_exact = all(each.is_exact for each in figures)
    how = "with the engine's own scheduler" if is_exact else "fast-forward"
    return f"Simulated {how} in {took_s:.1f} s."
