"""Formats several plans, of models, accelerators and roles under the same load, as one table and as JSON.

Lines below the table name the cheapest, and the cause and the remedy for subjects without a plan. `report` formats a
single plan, `role_table` the parts of separate roles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagemill.columns import columns
from pagemill.planning import report
from pagemill.planning.answering import AnswerOrError, PlanAnswer
from pagemill.planning.forecast import PlannedWorkload, ServingCost
from pagemill.planning.roles import table as role_table
from pagemill.planning.roles.pairs import PairAnswer
from pagemill.planning.users import Users
from pagemill.printable import printable
from pagemill_operator.autoscaler.settings import Slo

HEAD = ["REPLICAS", "GPUS EACH", "CONCURRENCY", "AT MAX LENGTH", "REQUESTS/S", "UTILIZATION"]
COSTS = ["COST/H", "PER 1M TOKENS", "PER 1M OUTPUT"]
LATENCIES = 2


class Compared(NamedTuple):
    """Everything that is shown together."""

    plans: Sequence[AnswerOrError]
    pairs: Sequence[PairAnswer] | None
    """The forecasts of separate roles; `None` if they were not asked for."""
    load: PlannedWorkload
    users: Users | None
    slo: Slo

    @property
    def has_models(self) -> bool:
        return len({each.subject.label for each in self.plans}) > 1

    @property
    def has_costs(self) -> bool:
        return any(each.answer is not None and cost_of(each.answer) is not None for each in self.plans)


class Priced(NamedTuple):
    """A plan or a forecast of separate roles that meets the SLO, and its price."""

    model: str
    devices: list[str]
    roles: str
    is_served: bool
    """Whether Pagemill serves it: mixed replicas on devices for which the engine has kernels."""
    cost: ServingCost | None


def cost_of(answer: PlanAnswer) -> ServingCost | None:
    """Return the cost of the chosen number of replicas."""
    return next(row.cost for row in answer.forecast.rows if row.candidate is answer.forecast.chosen)


def cheapest(compared: Compared, *, is_served: bool = False) -> Priced | None:
    """Return the cheapest of all that meet the SLO, or of those that Pagemill serves; `None` if a price is unknown."""
    found = [each for each in _meeting(compared) if each.is_served or not is_served]
    costs = [(each.cost.per_hour, each) for each in found if each.cost is not None]
    if len(costs) < len(found):
        return None
    return min(costs, key=lambda priced: priced[0], default=(0.0, None))[1]


def _meeting(compared: Compared) -> list[Priced]:
    """Return all that meet the SLO."""
    found = []
    for each in compared.plans:
        subject, answer = each.subject, each.answer
        if answer is not None and answer.forecast.needed is not None:
            found.append(Priced(subject.label, [subject.device], role_table.MIXED, answer.is_served, cost_of(answer)))
    return found + [
        Priced(pair.prefill.label, pair.devices, role_table.ROLES, False, chosen.cost)
        for pair in compared.pairs or ()
        if (chosen := pair.forecast.chosen) is not None
    ]


def as_json(compared: Compared) -> str:
    best = cheapest(compared)
    body = {
        "load": report.load_as_json(compared.load, compared.users),
        "slo": report.slo_as_json(compared.slo),
        "plans": [_body(each) for each in compared.plans],
        "roles": None if compared.pairs is None else [role_table.body_of(each) for each in compared.pairs],
        "cheapest": None if best is None else _priced_body(best),
    }
    return json.dumps(body, indent=1)


def _priced_body(priced: Priced) -> dict[str, Any]:
    return {"model": priced.model, "accelerators": priced.devices, "served": priced.is_served}


def _body(each: AnswerOrError) -> dict[str, Any]:
    name = {"model": each.subject.label, "accelerator": each.subject.device}
    if each.answer is None:
        return {**name, "error": each.error}
    return {**name, **report.body_of(each.answer)}


def as_table(compared: Compared) -> str:
    title = report.load_text(compared.load, compared.users) + report.within(compared.slo)
    if not compared.has_models:
        title = f"{compared.plans[0].subject.label}: {title}"
    rows = [_row(each, compared) for each in compared.plans]
    rows += [_pair_row(each, compared) for each in compared.pairs or ()]
    lines = [title, "", *columns([_head(compared), *rows]), ""]
    lines += _cheapest_line(compared)
    for each in compared.plans:
        words = each.error or _remark(each.answer)
        if words:
            lines.append(f"{_name(compared, each.subject.label, each.subject.device)}: {words}")
    for pair in compared.pairs or ():
        lines.append(f"{_name(compared, pair.prefill.label, role_table.name_of(pair))}: {role_table.remark_of(pair)}")
    sources = {
        each.answer.replica.step_time_from: each.subject.device for each in compared.plans if each.answer is not None
    }
    lines += [f"{name}: step times {source}" for source, name in sources.items()]
    if compared.pairs is not None:
        lines.append(role_table.NOTE)
    return printable("\n".join(lines))


def _head(compared: Compared) -> list[str]:
    share = f"P{compared.slo.share * 100:.0f}"
    latencies, costs = [f"TTFT {share}", f"TPOT {share}"], COSTS if compared.has_costs else []
    return [*_first(compared, "MODEL", "ACCELERATOR", "ROLES"), *HEAD, *latencies, *costs]


def _first(compared: Compared, model: str, device: str, roles: str) -> list[str]:
    """Return the first cells of a row: those of the model and of the roles only if they differ."""
    has_roles = compared.pairs is not None
    return [*([model] if compared.has_models else []), device, *([roles] if has_roles else [])]


def _name(compared: Compared, model: str, device: str) -> str:
    return f"{model} on {device}" if compared.has_models else device


def _cells(cost: ServingCost | None) -> list[str]:
    return ["-"] * len(COSTS) if cost is None else [f"{number:.4g}" for number in cost]


def _row(each: AnswerOrError, compared: Compared) -> list[str]:
    first = _first(compared, each.subject.label, each.subject.device, role_table.MIXED)
    found = each.answer
    if found is None:
        return [*first, *["-"] * (len(HEAD) + LATENCIES + compared.has_costs * len(COSTS))]
    forecast, chosen = found.forecast, found.forecast.chosen
    return [
        *first,
        str(forecast.needed) if forecast.needed is not None else f"> {forecast.most}",
        str(found.gpus) if found.gpus else "-",
        *_concurrency(found),
        f"{found.workload.requests_per_s:.3g}",
        "-" if forecast.utilization is None else f"{forecast.utilization:.0%}",
        report.milliseconds(chosen.ttft_ms),
        report.milliseconds(chosen.tpot_ms),
        *(_cells(cost_of(found)) if compared.has_costs else []),
    ]


def _concurrency(found: PlanAnswer) -> list[str]:
    forecast = found.forecast
    return [str(forecast.at_once), f"{forecast.at_once_longest} x {found.replica.max_model_len:,}"]


def _pair_row(pair: PairAnswer, compared: Compared) -> list[str]:
    chosen = pair.forecast.chosen
    decode = next(each.answer for each in compared.plans if each.subject is pair.decode)
    assert decode is not None, "pairs are made of plans"
    costs = _cells(None if chosen is None else chosen.cost) if compared.has_costs else []
    first = _first(compared, pair.prefill.label, role_table.name_of(pair), role_table.ROLES)
    return [*first, *role_table.cells_of(pair, _concurrency(decode), costs)]


def _cheapest_line(compared: Compared) -> list[str]:
    best, served = cheapest(compared), cheapest(compared, is_served=True)
    if best is None or len(compared.plans) + len(compared.pairs or ()) < 2:
        return []
    line = f"Cheapest{report.within(compared.slo)}: {_priced(compared, best)}."
    if not best.is_served and served is not None:
        line = f"{line[:-1]}; of what Pagemill serves: {_priced(compared, served)}."
    return [line]


def _priced(compared: Compared, priced: Priced) -> str:
    name = _name(compared, priced.model, " + ".join(priced.devices))
    roles = "" if compared.pairs is None else f", {priced.roles}"
    per_hour = "" if priced.cost is None else f" ({priced.cost.per_hour:.4g} per hour)"
    return f"{name}{roles}{per_hour}"


def _remark(found: PlanAnswer | None) -> str:
    if found is None:
        return ""
    words = [found.note] if found.note else []
    if found.ranks is not None:
        words.append(found.ranks.reason)
    if found.forecast.needed is None:
        words.append(report.refusal(found.slo, found.forecast))
    return "; ".join(words)
