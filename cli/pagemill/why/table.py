"""Formats scaling decisions: one line for each, and the latest one with all its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pagemill.columns import columns
from pagemill.printable import printable
from pagemill.why.replaying import Replay
from pagemill_operator.autoscaler.decision import Decision, ReplicaCandidate
from pagemill_operator.autoscaler.records import Record
from pagemill_operator.autoscaler.signals import Signals


def as_json(where: str, records: Sequence[Record], replays: Sequence[Replay] | None) -> str:
    """Return the complete records as JSON, oldest first; `--file` accepts it."""
    body: dict[str, Any] = {
        "deployment": records[-1].key,
        "recordedBy": where,
        "records": [msgspec.to_builtins(record) for record in records],
        "costs": [_costs(record) for record in records],
    }
    if replays is not None:
        body["replays"] = [_replay(each) for each in replays]
    return json.dumps(body, indent=1)


def as_table(where: str, records: Sequence[Record], replays: Sequence[Replay] | None) -> str:
    latest = records[-1]
    lines = [f"{latest.key}: the last {_count(len(records), 'decision')}, recorded by {where}", ""]
    lines += columns([_head(replays), *(_row(record, replays, index) for index, record in enumerate(records))])
    lines += ["", f"Inputs of the decision at {latest.time}", *_details(latest), "", *_goals(latest.decision)]
    lines += _candidates(latest)
    return printable("\n".join(lines).rstrip())


def _costs(record: Record) -> dict[str, Any]:
    """Return the cost for an hour before and after the decision."""
    decision, cost_of = record.decision, record.settings.cost_of
    return {"before": cost_of(decision.replicas_before)._asdict(), "after": cost_of(decision.replicas)._asdict()}


def _replay(replay: Replay) -> dict[str, Any]:
    fault = {"fault": replay.fault} if replay.fault else {}
    return {"same": replay.is_same, "decision": msgspec.to_builtins(replay.decision), **fault}


def _head(replays: Sequence[Replay] | None) -> list[str]:
    return ["TIME", "REPLICAS", "REASON", *(["REPLAY"] if replays else []), "WHY"]


def _row(record: Record, replays: Sequence[Replay] | None, index: int) -> list[str]:
    decision = record.decision
    replayed = [replays[index].words] if replays else []
    return [record.time, _replicas(record), decision.reason, *replayed, decision.message]


def _replicas(record: Record) -> str:
    decision = record.decision
    if not decision.changes:
        return str(decision.replicas)
    advice = " (advice)" if record.settings.mode == "Advisory" else ""
    return f"{decision.replicas_before} -> {decision.replicas}{advice}"


def _details(record: Record) -> list[str]:
    signals, settings = record.signals, record.settings
    fleet, queue = signals.fleet, signals.queue
    start = "no cold start seen yet" if fleet.cold_start_s is None else f"a cold start takes {fleet.cold_start_s:.0f} s"
    asleep = f", {fleet.asleep} sleeping" if fleet.asleep else ""
    pending = f" ({fleet.pending} without a node)" if fleet.pending else ""
    rows = [
        ("policy", f"{settings.policy}, mode {settings.mode}, {settings.lowest} to {settings.max_replicas} replicas"),
        (
            "replicas",
            f"{fleet.wanted} desired: {fleet.ready} ready, {fleet.starting} starting{pending}{asleep}; {start}",
        ),
        (
            "gateways",
            f"{signals.num_reporting} of {signals.num_gateways} reporting; {queue.num_requests} requests queued",
        ),
        ("engines", _engines(signals)),
        ("arrivals", _arrivals(signals)),
        ("lengths", _lengths(signals)),
        ("latencies", _latencies(signals, settings.slo.share if settings.slo else 0.95)),
    ]
    rows.append(("cost", _cost(record)))
    if record.decision.missing:
        rows.append(("missing", "; ".join(record.decision.missing)))
    if record.decision.unreachable:
        rows.append(("SLO", record.decision.unreachable))
    return [f"  {line}" for line in columns(rows)]


def _cost(record: Record) -> str:
    decision, cost_of = record.decision, record.settings.cost_of
    after = f"{_count(decision.replicas, 'replica')}: {cost_of(decision.replicas)}"
    return f"{after} (before: {cost_of(decision.replicas_before)})" if decision.changes else after


def _engines(signals: Signals) -> str:
    engines = signals.engines
    if engines.truth == "unknown":
        return "unknown"
    total, active = engines.num_kv_bytes_total, engines.num_kv_bytes_active
    usage = f", {active / total:.0%} of the KV cache active" if total else ""
    stale = f" ({engines.truth}: {engines.age_s:.0f} s old)" if engines.truth == "stale" else ""
    counts = f"{engines.num_requests_running} running, {engines.num_requests_waiting} waiting{usage}"
    return f"{engines.num_reporting} reporting{stale}: {counts}"


def _arrivals(signals: Signals) -> str:
    arrivals = signals.arrivals
    if arrivals.truth != "value":
        return arrivals.truth
    burst = f", {arrivals.burst_requests_per_s:.2f}/s in the last {arrivals.burst_window_s:.0f} s"
    rate = f"{arrivals.requests_per_s:.2f} requests/s over {arrivals.window_s:.0f} s"
    return f"{rate}{burst if arrivals.burst_window_s else ''}; the latest {arrivals.idle_s:.0f} s ago"


def _lengths(signals: Signals) -> str:
    prompt, output = signals.lengths.prompt.mean(), signals.lengths.output.mean()
    if signals.lengths.truth != "value" or prompt is None or output is None:
        return "unknown"
    return f"mean {prompt:.0f} + {output:.0f} tokens"


def _latencies(signals: Signals, share: float) -> str:
    latencies = signals.latencies
    shown = [
        f"{name} {value:.0f} ms"
        for name, histogram in (("TTFT", latencies.ttft_ms), ("TPOT", latencies.tpot_ms))
        if (value := histogram.quantile(share)) is not None
    ]
    if latencies.truth != "value" or not shown:
        return "no answers in the last minute" if latencies.truth == "value" else latencies.truth
    return f"{', '.join(shown)} at P{share * 100:.0f} of the last minute's answers"


def _goals(decision: Decision) -> list[str]:
    rows = [
        [goal.name, str(goal.needed), str(goal.enough), goal.missing or goal.unreachable or goal.reason]
        for goal in decision.goals
        if goal.reason or goal.missing or goal.unreachable
    ]
    return columns([["GOAL", "NEEDS", "ENOUGH", "WHY"], *rows]) if rows else []


def _candidates(record: Record) -> Iterator[str]:
    """Yield a table of the numbers of replicas that were compared with the SLO.

    The policy may weigh them at a stricter percentile than the SLO's, or at more arrivals than it expects.
    """
    candidates, slo = record.decision.candidates, record.settings.slo
    if not candidates or slo is None:
        return
    costs = [record.settings.cost_of(each.replicas) for each in candidates]
    has_price = record.settings.replica_price is not None
    rows = [
        [
            str(each.replicas),
            f"{each.requests_per_s:.2f}" if each.requests_per_s else "-",
            f"P{100 * (each.share or slo.share):.4g}",
            _ms(each.ttft_ms),
            _ms(each.tpot_ms),
            f"{cost.pod_seconds:,}",
            *([f"{cost.money:.2f}"] if has_price else []),
            _meets(each, slo.share),
        ]
        for each, cost in zip(candidates, costs, strict=True)
    ]
    yield ""
    head = ["REPLICAS", "REQUESTS/S", "PERCENTILE", "TTFT", "TPOT", "POD-S/H", *(["COST/H"] if has_price else [])]
    yield from columns([[*head, "MEETS THE SLO"], *rows])


def _meets(candidate: ReplicaCandidate, share: float) -> str:
    if not candidate.meets:
        return f"no: limited by {candidate.limit}" if candidate.limit else "no"
    # Where no number meets the SLO, they are compared for the share of the requests that can have it.
    compared = candidate.share or share
    return "yes" if compared >= share else f"for {compared:.0%} of the requests only"


def _ms(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:.0f} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
