"""Formats one plan as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pagemill.columns import columns
from pagemill.planning.answering import PlanAnswer
from pagemill.planning.forecast import Forecast, ForecastRow, PlannedWorkload
from pagemill.planning.links.exchange import Exchange
from pagemill.planning.ranks.chosen_ranks import ChosenRanks
from pagemill.planning.replica import PlannedReplica
from pagemill.planning.simulated_latencies import SimulatedLatencies
from pagemill.planning.users import Users
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo


def as_json(answer: PlanAnswer) -> str:
    """Return the plan as JSON, which `--fit` accepts."""
    return json.dumps(body_of(answer), indent=1)


def body_of(answer: PlanAnswer) -> dict[str, Any]:
    """Return the JSON object that `docs/reference/plan.md` describes."""
    replica, forecast = answer.replica, answer.forecast
    shape = replica.shape
    return {
        "deployment": answer.plan.key,
        "workload": load_as_json(answer.workload, answer.workload.users),
        "slo": slo_as_json(answer.slo),
        "replica": {
            "device": replica.device,
            "gpus": answer.gpus,
            "note": answer.note,
            "weightBytes": replica.weight_bytes,
            "kvBytesPerToken": replica.kv_bytes_per_token,
            "stateBytes": replica.state_bytes,
            "adapters": None if replica.adapters is None else _adapters_body(replica),
            "podsPerReplica": answer.plan.pods_per_replica,
            "ranks": [
                {
                    "weightBytes": each.sizes.weight_bytes,
                    "kvBytesPerToken": each.sizes.kv_bytes_per_token,
                    "kvHeads": each.spec.num_kv_heads,
                    "layers": each.spec.num_layers,
                }
                for each in replica.ranks
            ],
            "exchange": None if replica.exchange is None else _exchange_body(replica.exchange, shape.max_step_tokens),
            "tightestRank": replica.tightest_rank,
            "chosenRanks": None if answer.ranks is None else _chosen_body(answer.ranks),
            "numBlocks": shape.num_blocks,
            "blockSize": shape.block_size,
            "maxModelLen": replica.max_model_len,
            "maxNumSeqs": shape.max_num_seqs,
            "maxNumBatchedTokens": shape.max_step_tokens,
            "memory": None if replica.budget is None else msgspec.to_builtins(replica.budget),
            "requestsAtOnce": forecast.at_once,
            "longestRequestsAtOnce": forecast.at_once_longest,
            "requestsPerSecond": forecast.capacity,
            "users": forecast.users_supported,
            "alone": None if replica.alone is None else replica.alone._asdict(),
        },
        "replicas": forecast.needed,
        "replicasKept": forecast.kept,
        "utilization": forecast.utilization,
        "idle": msgspec.to_builtins(forecast.idle),
        "simulated": None if answer.simulated is None else answer.simulated._asdict(),
        "candidates": [_candidate(row) for row in forecast.rows],
        "stepTimeFrom": replica.step_time_from,
        "stepTime": msgspec.to_builtins(shape.step_time),
        "notes": [str(each) for each in answer.plan.notes],
    }


def _exchange_body(exchange: Exchange, max_step_tokens: int) -> dict[str, Any]:
    return {
        "link": exchange.link._asdict(),
        "between": exchange.between._asdict() if exchange.stages > 1 else None,
        "sums": exchange.sums,
        "bytesPerToken": exchange.bytes_per_token,
        "sentBytesPerToken": exchange.sent_bytes(1),
        "sentBytesOfLargestStep": exchange.sent_bytes(max_step_tokens),
        "decodeMs": exchange.ms(1),
    }


def _chosen_body(ranks: ChosenRanks) -> dict[str, Any]:
    return {
        "tensorParallel": ranks.chosen.ranks.tensor_parallel,
        "pipelineParallel": ranks.chosen.ranks.pipeline_parallel,
        "reason": ranks.reason,
    }


def load_as_json(workload: PlannedWorkload, users: Users | None) -> dict[str, Any]:
    """Return the load as JSON; its rate is null if it depends on users and thus on the replica."""
    rate = workload.requests_per_s or None
    return {**workload._asdict(), "requests_per_s": rate, "users": None if users is None else users._asdict()}


def slo_as_json(slo: Slo) -> Any:
    return msgspec.to_builtins(slo)


def _candidate(row: ForecastRow) -> dict[str, Any]:
    cost = None if row.cost is None else row.cost._asdict()
    return {**msgspec.to_builtins(row.candidate), "cost": cost}


def as_table(answer: PlanAnswer) -> str:
    plan, slo, forecast = answer.plan, answer.slo, answer.forecast
    lines = [f"{plan.key}: {load_text(answer.workload, answer.workload.users)}", ""]
    lines += [f"  {line}" for line in columns(_properties(answer))]
    lines += ["", *columns([_head(slo, forecast), *(_row(row) for row in forecast.rows)]), ""]
    lines += _conclusion(answer)
    lines += [f"note: {each}" for each in plan.notes]
    if answer.simulated is not None:
        lines.append(_simulation(answer.simulated, slo, forecast))
    return printable("\n".join(lines))


def _adapters_body(replica: PlannedReplica) -> dict[str, int]:
    assert replica.adapters is not None
    slots, rank, kept = replica.adapters
    num_bytes = 0 if replica.budget is None else replica.budget.adapter_bytes
    return {"slots": slots, "maxRank": rank, "inMemory": kept, "bytes": num_bytes}


def _adapters(replica: PlannedReplica) -> str:
    """Return the memory of adapters in words."""
    found = _adapters_body(replica)
    kept = f"{found['inMemory']} in memory of rank {found['maxRank']} on all layers, and one that is read"
    return f"{_size(found['bytes'])} for {kept}; {found['slots']} in one batch"


def load_text(workload: PlannedWorkload, users: Users | None) -> str:
    """Return the load in words."""
    tokens = f"{workload.input_tokens} + {workload.output_tokens} tokens"
    cached = f", {workload.cached_tokens} of them cached" if workload.cached_tokens else ""
    if users is None:
        return f"{workload.requests_per_s:g} requests/s of {tokens}{cached}"
    return f"{users.num_users} users with {users.think_s:g} s between requests of {tokens}{cached}"


def _properties(answer: PlanAnswer) -> list[tuple[str, str]]:
    replica, forecast = answer.replica, answer.forecast
    shape, fit = replica.shape, replica.shape.step_time
    cache = f"{shape.num_tokens:,} tokens in {shape.num_blocks:,} blocks"
    states = f" and {_size(replica.state_bytes)} of states per request" if replica.state_bytes else ""
    rows = [
        ("device", replica.device + (f"; {answer.note}" if answer.note else "")),
        ("weights", _size(replica.weight_bytes)),
        ("KV cache", f"{replica.kv_bytes_per_token / 1024:.1f} KiB per token{states}; {cache}"),
        (
            "concurrency",
            f"{forecast.at_once} such requests, or {forecast.at_once_longest} of {replica.max_model_len:,} tokens",
        ),
        ("step times", replica.step_time_from + (f"; typical error {fit.error_p50:.0%}" if fit.error_p50 else "")),
    ]
    if fit.tokens_per_decode > 1:
        words = f"a decode samples {fit.tokens_per_decode:.3g} of {fit.computed_per_decode:.3g} tokens in a step"
        rows.append(("proposed tokens", words))
    if replica.ranks:
        from pagemill_execution.sizing.rank_parts import describe_ranks  # imports what reads weights

        lines = describe_ranks(replica.ranks, replica.ranks_of_stage)
        rows[2:2] = [("processes" if replica.exchange is None else "devices", line) for line in lines]
        if replica.exchange is not None:
            rows.insert(2 + len(lines), ("exchange", _exchange(replica.exchange, shape.max_step_tokens)))
        if replica.tightest_rank is not None and len({each.sizes for each in replica.ranks}) > 1:
            rows.insert(2 + len(lines), ("tightest", f"rank {replica.tightest_rank}, whose device limits the KV cache"))
    if (pods := answer.plan.pods_per_replica) > 1:
        words = f"{pods} pods with {len(replica.ranks) // pods} of the ranks each; their network takes more time"
        rows.insert(1, ("group", words))
    if answer.ranks is not None:
        rows.insert(1, ("ranks", answer.ranks.reason))
    if replica.adapters is not None:
        rows.insert(3, ("adapters", _adapters(replica)))
    if replica.budget is not None:
        free = f"{_size(replica.budget.free_bytes)} of {_size(replica.budget.limit_bytes)} left in full use"
        rows.insert(3, ("memory", free))
    if replica.alone is not None:
        tpot = "" if replica.alone.tpot_ms is None else f", then {replica.alone.tpot_ms:.1f} ms per token"
        rows.append(("one request", f"first token after {replica.alone.ttft_ms:.0f} ms{tpot} (measured)"))
    workload = answer.workload
    if workload.users is not None and workload.answering is not None:
        busy = f"{workload.answering:.3g} of {workload.users.num_users} wait for an answer on average (Little's law)"
        rows.insert(0, ("users", f"{workload.requests_per_s:.3g} requests/s; {busy}"))
    return rows


def _exchange(exchange: Exchange, max_step_tokens: int) -> str:
    """Return what ranks send to each other in words."""
    words = []
    if exchange.ranks > 1:
        words.append(f"{exchange.sums} sums a step over {exchange.link.name}")
    if exchange.stages > 1:
        words.append(f"{exchange.stages} stages over {exchange.between.name}")
    largest = _size(exchange.sent_bytes(max_step_tokens))
    return (
        f"{' and '.join(words)}, each of {exchange.bytes_per_token / 1024:.0f} KiB per token: "
        f"{exchange.sent_bytes(1) / 1024:.0f} KiB per token and rank, {largest} in the largest step"
    )


def _head(slo: Slo, forecast: Forecast) -> list[str]:
    share = f"P{slo.share * 100:.0f}"
    costs = ["COST/H", "PER 1M TOKENS", "PER 1M OUTPUT"] if forecast.rows[0].cost is not None else []
    return ["REPLICAS", f"TTFT {share}", f"TPOT {share}", *costs, "MEETS " + (slo_text(slo) or "THE LOAD")]


def _row(row: ForecastRow) -> list[str]:
    candidate, cost = row.candidate, row.cost
    costs = [] if cost is None else [f"{number:.4g}" for number in cost]
    limit = f": limited by {candidate.limit}" if candidate.limit else ""
    meets = "yes" if candidate.meets else f"no{limit}"
    return [str(candidate.replicas), milliseconds(candidate.ttft_ms), milliseconds(candidate.tpot_ms), *costs, meets]


def refusal(slo: Slo, forecast: Forecast) -> str:
    """Return the sentence that says why no number of replicas suffices."""
    if not forecast.idle.meets:
        idle = f"TTFT {milliseconds(forecast.idle.ttft_ms)} and TPOT {milliseconds(forecast.idle.tpot_ms)}"
        return (
            f"No number of replicas serves this load{within(slo)}: even a request alone on a replica has {idle}. Raise "
            "the SLO, shorten the requests, or use a faster device or a smaller model."
        )
    return (
        f"Up to {forecast.most} replicas cannot serve this load{within(slo)}: raise the SLO or maxReplicas, shorten "
        "the requests, or use faster replicas."
    )


def _conclusion(answer: PlanAnswer) -> list[str]:
    plan, slo, forecast = answer.plan, answer.slo, answer.forecast
    if forecast.needed is None:
        return [refusal(slo, forecast)]
    users = "" if forecast.users_supported is None else f" ({forecast.users_supported} such users)"
    capacity = f"one replica serves up to {forecast.capacity:.3g} requests/s{users}"
    utilization = "" if forecast.utilization is None else f"; utilization {forecast.utilization:.0%}"
    lines = [f"{_count(forecast.needed)} needed{within(slo)}; {capacity}{utilization}."]
    if plan.autoscaling is not None and forecast.kept is not None and forecast.kept > forecast.needed:
        lines.append(f"The autoscaler keeps {forecast.kept} replicas, so that 10 % more load would still fit.")
    if answer.is_of_file and plan.autoscaling is None and plan.spec_replicas != forecast.needed:
        lines.append(f"The file has spec.replicas: {plan.spec_replicas}.")
    return lines


def _simulation(simulated: SimulatedLatencies, slo: Slo, forecast: Forecast) -> str:
    tpot = "" if simulated.tpot_ms is None else f", TPOT {milliseconds(simulated.tpot_ms)}"
    latencies = (
        f"TTFT {milliseconds(simulated.ttft_ms)}{tpot} at P{slo.share * 100:.0f} of {simulated.num_requests} requests"
    )
    return f"Simulation of one of {forecast.chosen.replicas} replicas with the engine's scheduler: {latencies}."


def within(slo: Slo) -> str:
    """Return the SLO as the end of a phrase; empty if it has no limits."""
    return f" within {slo_text(slo)}" if slo_text(slo) else ""


def slo_text(slo: Slo) -> str:
    named = [f"{name} {limit_ms:g} ms" for name, limit_ms in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if limit_ms]
    return " and ".join(named)


def milliseconds(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"


def _count(replicas: int) -> str:
    return "1 replica is" if replicas == 1 else f"{replicas} replicas are"
