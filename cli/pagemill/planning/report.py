"""A plan as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pagemill.columns import columns
from pagemill.planning.forecast import Forecast, Row, Workload
from pagemill.planning.rehearsal import Rehearsed
from pagemill.planning.replica import Replica
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo
from pagemill_operator.plan.types import Plan


def as_json(
    plan: Plan, replica: Replica, workload: Workload, slo: Slo, forecast: Forecast, rehearsed: Rehearsed | None
) -> str:
    """`--fit` reads it again."""
    shape = replica.shape
    body: dict[str, Any] = {
        "deployment": plan.key,
        "workload": workload._asdict(),
        "slo": msgspec.to_builtins(slo),
        "replica": {
            "device": replica.device,
            "weightBytes": replica.weight_bytes,
            "kvBytesPerToken": replica.kv_bytes_per_token,
            "numBlocks": shape.num_blocks,
            "blockSize": shape.block_size,
            "maxModelLen": replica.max_model_len,
            "maxNumSeqs": shape.max_num_seqs,
            "maxNumBatchedTokens": shape.max_step_tokens,
            "memory": None if replica.budget is None else msgspec.to_builtins(replica.budget),
            "requestsAtOnce": forecast.at_once,
            "longestRequestsAtOnce": forecast.at_once_longest,
            "requestsPerSecond": forecast.capacity,
            "alone": None if replica.alone is None else replica.alone._asdict(),
        },
        "replicas": forecast.needed,
        "replicasKept": forecast.kept,
        "idle": msgspec.to_builtins(forecast.idle),
        "simulated": None if rehearsed is None else rehearsed._asdict(),
        "candidates": [_candidate(row) for row in forecast.rows],
        "stepTimeFrom": replica.step_time_from,
        "stepTime": msgspec.to_builtins(shape.step_time),
    }
    return json.dumps(body, indent=1)


def _candidate(row: Row) -> dict[str, Any]:
    cost = None if row.cost is None else row.cost._asdict()
    return {**msgspec.to_builtins(row.candidate), "cost": cost}


def as_table(
    plan: Plan, replica: Replica, workload: Workload, slo: Slo, forecast: Forecast, rehearsed: Rehearsed | None
) -> str:
    load = f"{workload.requests_per_s:g} requests/s of {workload.input_tokens} + {workload.output_tokens} tokens"
    cached = f", {workload.cached_tokens} of them cached" if workload.cached_tokens else ""
    lines = [f"{plan.key} under {load}{cached}", ""]
    lines += [f"  {line}" for line in columns(_about(replica, forecast))]
    lines += ["", *columns([_head(slo, forecast), *(_row(row) for row in forecast.rows)]), ""]
    lines += _verdict(plan, slo, forecast)
    if rehearsed is not None:
        lines.append(_felt(rehearsed, slo, forecast))
    return printable("\n".join(lines))


def _about(replica: Replica, forecast: Forecast) -> list[tuple[str, str]]:
    shape, fit = replica.shape, replica.shape.step_time
    cache = f"{shape.num_tokens:,} tokens in {shape.num_blocks:,} blocks"
    rows = [
        ("device", replica.device),
        ("weights", _size(replica.weight_bytes)),
        ("KV cache", f"{replica.kv_bytes_per_token / 1024:.1f} KiB a token; {cache}"),
        (
            "at once",
            f"{forecast.at_once} such requests, {forecast.at_once_longest} of {replica.max_model_len:,} tokens",
        ),
        ("step times", replica.step_time_from + (f"; typical error {fit.error_p50:.0%}" if fit.error_p50 else "")),
    ]
    if replica.budget is not None:
        free = f"{_size(replica.budget.free_bytes)} of {_size(replica.budget.limit_bytes)} are free when all is full"
        rows.insert(3, ("memory", free))
    if replica.alone is not None:
        tpot = "" if replica.alone.tpot_ms is None else f", then {replica.alone.tpot_ms:.1f} ms a token"
        rows.append(("alone", f"one request had its first token after {replica.alone.ttft_ms:.0f} ms{tpot}"))
    return rows


def _head(slo: Slo, forecast: Forecast) -> list[str]:
    share = f"P{slo.share * 100:.0f}"
    costs = ["COST/H", "PER 1M TOKENS", "PER 1M OUTPUT"] if forecast.rows[0].cost is not None else []
    return ["REPLICAS", f"TTFT {share}", f"TPOT {share}", *costs, "MEETS " + (_aims(slo) or "THE LOAD")]


def _row(row: Row) -> list[str]:
    candidate, cost = row.candidate, row.cost
    costs = [] if cost is None else [f"{number:.4g}" for number in cost]
    limit = f": out of {candidate.limit}" if candidate.limit else ""
    meets = "yes" if candidate.meets else f"no{limit}"
    return [str(candidate.replicas), _ms(candidate.ttft_ms), _ms(candidate.tpot_ms), *costs, meets]


def _verdict(plan: Plan, slo: Slo, forecast: Forecast) -> list[str]:
    aim = f" within {_aims(slo)}" if _aims(slo) else ""
    if forecast.needed is None and not forecast.idle.meets:
        idle = f"{_ms(forecast.idle.ttft_ms)} to its first token and {_ms(forecast.idle.tpot_ms)} a token"
        return [
            f"No number of replicas will do{aim}: a request that has one for itself takes {idle}. Raise the SLO, "
            "shorten the requests, or use a faster device or a smaller model."
        ]
    if forecast.needed is None:
        return [
            f"No number up to {forecast.most} carries this load{aim}: raise the SLO or maxReplicas, shorten the "
            "requests, or use faster replicas."
        ]
    lines = [f"{_count(forecast.needed)} needed{aim}; one replica carries up to {forecast.capacity:.3g} requests/s."]
    if plan.autoscaling is not None and forecast.kept is not None and forecast.kept > forecast.needed:
        lines.append(f"The autoscaler removes none below {forecast.kept}: a tenth more load must still fit.")
    if plan.autoscaling is None and plan.spec_replicas != forecast.needed:
        lines.append(f"The file has replicas: {plan.spec_replicas}.")
    return lines


def _felt(rehearsed: Rehearsed, slo: Slo, forecast: Forecast) -> str:
    tpot = "" if rehearsed.tpot_ms is None else f", TPOT {_ms(rehearsed.tpot_ms)}"
    felt = f"TTFT {_ms(rehearsed.ttft_ms)}{tpot} at P{slo.share * 100:.0f} of {rehearsed.num_requests} requests"
    return f"Simulated with the engine's own scheduler, one of {forecast.chosen.replicas}: {felt}."


def _aims(slo: Slo) -> str:
    aims = [f"{name} {limit_ms:g} ms" for name, limit_ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if limit_ms]
    return " and ".join(aims)


def _ms(value: float | None) -> str:
    return "without bound" if value is None else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"


def _count(replicas: int) -> str:
    return "1 replica is" if replicas == 1 else f"{replicas} replicas are"
