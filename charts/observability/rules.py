"""The recording rules: headroom, forecast, goodput, waste, cost and burn rates, each for one model.

Recorded names begin with the labels that they keep: `model:pagemill_headroom:ratio`. `alerts` and `dashboards` use
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml

from observability.promql import by_model, rate, serving
from pagemill_protocol.report.outcomes import BURNING, COUNTED, NO_FIRST_TOKEN, Outcome

SATURATED = 0.9
"""Share of the KV cache above which requests wait or are preempted."""
TARGET = 0.8
"""Share of the KV cache for which `replicas_needed` counts replicas."""
TREND = "30m"
LINEAR, GROWTH = "45m", "60m"
"""Windows of the two trends that `SATURATION` chooses from: a straight line, and growth by a constant factor."""
FIRST_TOKENS = "pagemill_gateway_time_to_first_token_seconds"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
COUNTED_WINDOWS = {"6h": 21_600, "3d": 259_200}
"""Windows, in seconds, of which alerts want a number of missed requests."""
MAX_FORECAST_MINUTES = 1440


class Rule(NamedTuple):
    """One recording rule."""

    record: str
    expr: str
    about: str
    labels: dict[str, str] = {}  # noqa: RUF012  # nothing changes it

    def document(self) -> dict[str, Any]:
        return {"record": self.record, "expr": self.expr, **({"labels": self.labels} if self.labels else {})}


OBJECTIVE = "variant_le:pagemill_first_token_budget:ratio"
ERROR_BUDGET = "model:pagemill_error_budget:ratio"
WITHOUT_GPUS = "model:pagemill_replicas_without_gpus:count"
MISSED = "model_slo:pagemill_missed_requests:increase"
TENANT_MISSED = "tenant:pagemill_missed_requests:increase"
TENANT_COST = "tenant_model:pagemill_cost:per_hour"
USAGE = "model_resource:pagemill_usage:ratio"
HEADROOM = "model:pagemill_headroom:ratio"
READY = "model:pagemill_engines_ready:count"
KV_USED = "model:pagemill_kv_used:replicas"
KV_USED_LOG = "model:pagemill_kv_used:ln"
CEILING = "model:pagemill_replicas_ceiling:count"
SATURATION = "model:pagemill_kv_saturation:minutes"
NEEDED = "model:pagemill_replicas_needed:count"
WAITING = "model:pagemill_waiting_requests:count"
AT_MAXIMUM = "model:pagemill_replicas_at_maximum:bool"
FIRST_TOKEN = "model:pagemill_first_token_p95:seconds"
SERVED = "model:pagemill_tokens_served:rate5m"
GOODPUT = "model:pagemill_goodput_requests:rate5m"
WASTE = "model:pagemill_waste:ratio"
COST = "model:pagemill_cost:per_hour"
IDLE_COST = "model:pagemill_idle_cost:per_hour"
TOKEN_COST = "model:pagemill_cost:per_million_tokens"


def burn(window: str) -> str:
    return f"model_slo:pagemill_error_budget_burn:rate{window}"


def tenant_burn(window: str) -> str:
    return f"tenant:pagemill_error_budget_burn:rate{window}"


def within_objective(window: str) -> str:
    """Return each model's first tokens per second that were within the objective of their deployment."""
    return f"sum by (model) ({rate(f'{FIRST_TOKENS}_bucket', window)} and on (model, variant, le) {OBJECTIVE})"


def capacity_rules() -> list[Rule]:
    running = by_model(serving("vllm:num_requests_running"))
    places = by_model(serving("pagemill_engine_max_num_seqs"))
    waiting = "sum by (model) (pagemill_gateway_queue_requests)"
    none_ready = '0 * (sum by (model) (pagemill_gateway_endpoints{phase="ready"}) == 0)'
    usage = by_model(serving("vllm:kv_cache_usage_perc"))
    return [
        Rule(READY, by_model("pagemill_engine_ready"), "Engines that accept requests."),
        Rule(KV_USED, usage, "KV cache that requests hold, in units of one replica's cache."),
        Rule(
            KV_USED_LOG, f"ln(clamp_min({KV_USED}, 0.001))", "Its natural logarithm: linear if growth is exponential."
        ),
        Rule(USAGE, f"{KV_USED} / ({READY} > 0)", "Share of the KV cache in use.", {"resource": "kv"}),
        Rule(USAGE, f"{running} / ({places} > 0)", "Share of the sequence slots in use.", {"resource": "sequences"}),
        Rule(HEADROOM, f"1 - max by (model) ({USAGE})", "Free share of the scarcer of KV cache and sequence slots."),
        Rule(CEILING, "sum by (model) (pagemill_deployment_max_replicas)", "Maximum of replicas."),
        Rule(
            WITHOUT_GPUS,
            "sum by (model) (pagemill_deployment_replicas_without_gpus)",
            "Replicas that wait because no node has free GPUs.",
        ),
        Rule(
            WAITING,
            f"{waiting} + on (model) ({by_model(serving('vllm:num_requests_waiting'))} or {none_ready})",
            "Requests that wait in gateways and engines; absent while engines are ready and not scraped.",
        ),
        Rule(
            AT_MAXIMUM,
            "sum by (model) (pagemill_deployment_desired_replicas) >= bool "
            "sum by (model) (pagemill_deployment_max_replicas)",
            "1 where no more replicas can be ordered.",
        ),
        Rule(
            SATURATION,
            f"clamp({_minutes_until_saturation()}, 0, {MAX_FORECAST_MINUTES})",
            f"Minutes until {SATURATED:.0%} of the KV cache of the maximum of replicas is used, at the better fitting "
            f"of a linear trend of {LINEAR} and an exponential one of {GROWTH}; absent while it falls.",
        ),
        *(
            Rule(
                NEEDED,
                f"ceil(clamp_min(predict_linear({KV_USED}[{TREND}], {minutes_ahead * 60}), 0) / {TARGET})",
                f"Replicas at which the KV cache is {TARGET:.0%} full.",
                {"horizon": f"{minutes_ahead}m"},
            )
            for minutes_ahead in (0, 5, 30)
        ),
    ]


def _minutes_until_saturation() -> str:
    """Return the minutes by the trend that explains more of the variance of the last `GROWTH`: a line, or a line
    through
    the logarithms.

    The explained share is the squared slope times the variance of time, divided by that of the values; the variance of
    time is the same for both.
    """
    linear = f"({SATURATED} * {CEILING} - predict_linear({KV_USED}[{LINEAR}], 0)) / (deriv({KV_USED}[{LINEAR}]) > 0)"
    target = f"ln({SATURATED} * {CEILING})"
    growing = f"({target} - predict_linear({KV_USED_LOG}[{GROWTH}], 0)) / (deriv({KV_USED_LOG}[{GROWTH}]) > 0)"
    return f"(({growing} and {_explained(KV_USED_LOG)} > {_explained(KV_USED)}) or {linear}) / 60"


def _explained(series: str) -> str:
    return f"deriv({series}[{GROWTH}]) ^ 2 / stdvar_over_time({series}[{GROWTH}])"


def work_rules() -> list[Rule]:
    """Return the rules of what users got for the work and the money."""
    served = 'pagemill_gateway_tokens_total{kind=~"prompt|completion"}'
    got = "sum by (model) (" + rate('pagemill_gateway_tokens_total{kind="completion"}', "15m") + ")"
    generated = by_model(rate("vllm:generation_tokens_total", "15m"))
    hourly = f"3600 * (sum by (model) ({rate(served, '1h')}) > 0)"
    of_tenants = rate("pagemill_gateway_tenant_tokens_total", "1h")
    return [
        Rule(SERVED, f"sum by (model) ({rate(served, '5m')})", "Prompt and generated tokens per second."),
        Rule(
            GOODPUT,
            within_objective("5m"),
            "Requests per second whose first token came within the objective of their deployment.",
        ),
        Rule(
            WASTE,
            f"clamp_min(1 - {got} / ({generated} > 0), 0)",
            "Share of the generated tokens that no client of a gateway got.",
        ),
        Rule(
            FIRST_TOKEN,
            f"histogram_quantile(0.95, sum by (model, le) ({rate(f'{FIRST_TOKENS}_bucket', '5m')})) >= 0",
            "95th percentile of the time to first token that clients of gateways see.",
        ),
        Rule(COST, "sum by (model) (pagemill_deployment_hour_price)", "Price of all of the model's pods."),
        Rule(
            TENANT_COST,
            f"sum by (tenant, model) ({of_tenants}) / on (model) group_left () (sum by (model) ({of_tenants}) > 0) "
            f"* on (model) group_left () {COST}",
            "Each tenant's part of the price, by its share of the tokens of the last hour; tenant `-`: none.",
        ),
        Rule(IDLE_COST, f"{COST} * {HEADROOM}", "Price of the headroom."),
        Rule(TOKEN_COST, f"1e6 * {COST} / ({hourly})", "Price of a million tokens served in the last hour."),
    ]


def objective_rules() -> list[Rule]:
    """Return the objectives, which the operator exports for every deployment: without it there are none."""
    return [
        Rule(
            OBJECTIVE,
            "max by (model, variant, le) (pagemill_deployment_first_token_budget_ratio)",
            "Share of the requests whose first token may take more than `le` seconds.",
        ),
        Rule(
            ERROR_BUDGET,
            "min by (model) (pagemill_deployment_error_budget_ratio)",
            "Share of the requests that may fail; of several deployments with one model name, the strictest.",
        ),
    ]


def slo_rules() -> Iterator[Rule]:
    """Return burn rates, and the requests behind them: with few, a single failure looks like a fast burn."""
    failed, ended = _requests(BURNING), _requests(COUNTED)
    without = _requests(NO_FIRST_TOKEN, 'stream="true"')
    late_budget = f"on (model) min by (model) ({OBJECTIVE})"
    about = "Rate at which the error budget is used up, as a multiple of the allowed rate."
    for window in WINDOWS:
        total = f"sum by (model) ({rate(ended, window)})"
        errors = _or_zero(f"sum by (model) ({rate(failed, window)})", total)
        first_tokens = f"sum by (model) ({rate(f'{FIRST_TOKENS}_count', window)} or {rate(without, window)})"
        known = f"({first_tokens} and on (model) {OBJECTIVE})"
        late = f"({known} - {_or_zero(within_objective(window), known)})"
        yield Rule(
            burn(window), f"{errors} / ({total} > 0) / on (model) {ERROR_BUDGET}", about, {"slo": "availability"}
        )
        yield Rule(burn(window), f"{late} / ({first_tokens} > 0) / {late_budget}", about, {"slo": "first_token"})
        if window in COUNTED_WINDOWS:
            seconds = COUNTED_WINDOWS[window]
            missed = f"Requests of the last {window} that missed the objective."
            yield Rule(MISSED + window, f"{seconds} * {errors}", missed, {"slo": "availability"})
            yield Rule(MISSED + window, f"{seconds} * {late}", missed, {"slo": "first_token"})


def tenant_rules() -> Iterator[Rule]:
    """Return burn rates of tenants whose keys have an objective."""
    failed = f'pagemill_gateway_tenant_requests_total{{outcome=~"{"|".join(BURNING)}"}}'
    for window in WINDOWS:
        allowed = f"sum by (tenant) ({rate('pagemill_gateway_tenant_error_budget_total', window)})"
        errors = f"(sum by (tenant) ({rate(failed, window)}) or 0 * {allowed})"
        about = "Rate at which a tenant's error budget is used up, as a multiple of the allowed rate."
        yield Rule(tenant_burn(window), f"{errors} / ({allowed} > 0)", about)
        if window in COUNTED_WINDOWS:
            about = f"Failed requests of the last {window} of tenants with an objective."
            yield Rule(TENANT_MISSED + window, f"{COUNTED_WINDOWS[window]} * {errors} and {allowed}", about)


def _requests(outcomes: Iterable[Outcome], *matchers: str) -> str:
    of = ",".join((f'outcome=~"{"|".join(outcomes)}"', *matchers))
    return f"pagemill_gateway_outcomes_total{{{of}}}"


def _or_zero(expression: str, present: str) -> str:
    """Return the expression with 0 for models that only `present` has."""
    return f"({expression} or 0 * {present})"


def recording_groups() -> dict[str, list[Rule]]:
    return {
        "pagemill.capacity": capacity_rules(),
        "pagemill.work": [*objective_rules(), *work_rules()],
        "pagemill.slo": list(slo_rules()),
        "pagemill.tenants": list(tenant_rules()),
    }


def rules_file(alerts: list[dict[str, Any]]) -> str:
    """Return a rules file for Prometheus; `alerts` form its last group."""
    groups = [
        {"name": name, "interval": "30s", "rules": [each.document() for each in rules]}
        for name, rules in recording_groups().items()
    ]
    groups.append({"name": "pagemill.alerts", "interval": "30s", "rules": alerts})
    note = "# Generated from charts/observability by `python charts/generate.py`; do not edit.\n"
    return note + yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)
