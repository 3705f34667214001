"""Formats several plans, of models and accelerators under the same load, as one table and as JSON.

Lines below the table name the cause and the remedy for subjects without a plan. `report` formats a single plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagemill.columns import columns
from pagemill.planning import report
from pagemill.planning.answering import AnswerOrError, PlanAnswer
from pagemill.planning.forecast import PlannedWorkload
from pagemill.planning.users import Users
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo

HEAD = ["ACCELERATOR", "REPLICAS", "GPUS EACH", "CONCURRENCY", "AT MAX LENGTH", "REQUESTS/S", "UTILIZATION"]
COSTS = ["COST/H", "PER 1M TOKENS", "PER 1M OUTPUT"]


def as_json(compared: Sequence[AnswerOrError], load: PlannedWorkload, users: Users | None, slo: Slo) -> str:
    body = {
        "load": report.load_as_json(load, users),
        "slo": report.slo_as_json(slo),
        "plans": [_body(each) for each in compared],
    }
    return json.dumps(body, indent=1)


def _body(each: AnswerOrError) -> dict[str, Any]:
    name = {"model": each.subject.label, "accelerator": each.subject.device}
    if each.answer is None:
        return {**name, "error": each.error}
    return {**name, **report.body_of(each.answer)}


def as_table(compared: Sequence[AnswerOrError], load: PlannedWorkload, users: Users | None, slo: Slo) -> str:
    has_models = len({each.subject.label for each in compared}) > 1
    has_costs = any(each.answer is not None and each.answer.forecast.rows[0].cost is not None for each in compared)
    share = f"P{slo.share * 100:.0f}"
    head = [*(["MODEL"] if has_models else []), *HEAD, f"TTFT {share}", f"TPOT {share}", *(COSTS if has_costs else [])]
    limits = report.slo_text(slo)
    title = report.load_text(load, users) + (f" within {limits}" if limits else "")
    rows = [_row(each, has_models, has_costs) for each in compared]
    lines = [title if has_models else f"{compared[0].subject.label}: {title}", "", *columns([head, *rows]), ""]
    for each in compared:
        words = each.error or _remark(each.answer)
        if words:
            lines.append(f"{f'{each.subject.label} on ' if has_models else ''}{each.subject.device}: {words}")
    sources = {each.answer.replica.step_time_from: each.subject.device for each in compared if each.answer is not None}
    lines += [f"{name}: step times {source}" for source, name in sources.items()]
    return printable("\n".join(lines))


def _row(each: AnswerOrError, has_models: bool, has_costs: bool) -> list[str]:
    first = [each.subject.label, each.subject.device] if has_models else [each.subject.device]
    found = each.answer
    if found is None:
        return [*first, *["-"] * (len(HEAD) + 1 + has_costs * len(COSTS))]
    forecast, chosen = found.forecast, found.forecast.chosen
    cost = next(row.cost for row in forecast.rows if row.candidate is chosen)
    costs = ["-"] * len(COSTS) if cost is None else [f"{number:.4g}" for number in cost]
    return [
        *first,
        str(forecast.needed) if forecast.needed is not None else f"> {forecast.most}",
        str(found.gpus) if found.gpus else "-",
        str(forecast.at_once),
        f"{forecast.at_once_longest} x {found.replica.max_model_len:,}",
        f"{found.workload.requests_per_s:.3g}",
        "-" if forecast.utilization is None else f"{forecast.utilization:.0%}",
        report.milliseconds(chosen.ttft_ms),
        report.milliseconds(chosen.tpot_ms),
        *(costs if has_costs else []),
    ]


def _remark(found: PlanAnswer | None) -> str:
    if found is None:
        return ""
    words = [found.note] if found.note else []
    if found.forecast.needed is None:
        words.append(report.refusal(found.slo, found.forecast))
    return "; ".join(words)
