"""For each recording rule and alert, series with a result and series without one.

Series are in the notation of `promtool test rules`: `0+2x60` is 0, 2, 4, ... once a minute.
"""

from __future__ import annotations

from typing import NamedTuple

MODEL = 'model="tiny"'
OF = '{instance="a",model_name="tiny"}'
READY = {f"pagemill_engine_ready{OF}": "1x90"}
ASLEEP = {f"pagemill_engine_ready{OF}": "0x60"}
KV = f"vllm:kv_cache_usage_perc{OF}"
TOKENS = f'pagemill_gateway_tokens_total{{kind="completion",{MODEL}}}'
FIRST = "pagemill_gateway_time_to_first_token_seconds"
VARIANT = 'variant="default/chat"'
WITHIN, FIRST_COUNT = f'{FIRST}_bucket{{le="2.5",{MODEL},{VARIANT}}}', f"{FIRST}_count{{{MODEL},{VARIANT}}}"
SOON = f'{FIRST}_bucket{{le="0.5",{MODEL},{VARIANT}}}'
REQUESTS = "pagemill_gateway_outcomes_total"
FAILED = f'{REQUESTS}{{outcome="failed_before_first_token",{MODEL}}}'
BROKEN = f'{REQUESTS}{{outcome="failed_after_first_token",stream="true",{MODEL}}}'
QUEUED_STREAM = f'{REQUESTS}{{outcome="no_capacity",stream="true",{MODEL}}}'
LEFT = f'{REQUESTS}{{outcome="client_left",{MODEL}}}'
REFUSED = f'{REQUESTS}{{outcome="refused",{MODEL}}}'
ANSWERED = f'{REQUESTS}{{outcome="completed",{MODEL}}}'
DEPLOYMENT = f'{{{MODEL},variant="default/chat"}}'
PRICE = f"pagemill_deployment_hour_price{DEPLOYMENT}"
WITHOUT_GPUS = f"pagemill_deployment_replicas_without_gpus{DEPLOYMENT}"
MAX = f"pagemill_deployment_max_replicas{DEPLOYMENT}"
DESIRED, UPDATED = (
    f"pagemill_deployment_desired_replicas{DEPLOYMENT}",
    f"pagemill_deployment_updated_replicas{DEPLOYMENT}",
)
BLAMED = f'pagemill_gateway_poison_probes_total{{{MODEL},outcome="blamed"}}'
CLEARED = f'pagemill_gateway_poison_probes_total{{{MODEL},outcome="cleared"}}'

Series = dict[str, str]


class RuleCase(NamedTuple):
    """A case of a rule: `value` is that of `expr` after `minutes` with these series, or None for no result."""

    record: str
    series: Series
    value: float | None
    labels: str = ""
    """Labels of the recorded series, in addition to the model."""
    minutes: int = 60
    of_series: str = ""
    """Labels of the recorded series that come from the rule's input."""
    of_model: str = MODEL


class AlertCase(NamedTuple):
    alert: str
    series: Series
    fires: bool
    minutes: int = 60


RISING = READY | {KV: "0+0.01x60"}
FALLING = READY | {KV: "0.9-0.01x60"}
DOUBLING = READY | {KV: " ".join(f"{0.45 * 2 ** ((minute - 60) / 20):.15g}" for minute in range(61))}
BUDGET = "variant_le:pagemill_first_token_budget:ratio"
SLOW_FIRST_TOKENS = {WITHIN: "0+50x60", FIRST_COUNT: "0+100x60"}
FIRST_TOKEN_BUDGET = "pagemill_deployment_first_token_budget_ratio"
USUAL = {f'{FIRST_TOKEN_BUDGET}{{le="2.5",{MODEL},{VARIANT}}}': "0.05x120"}
"""95 % within 2.5 s, as the operator exports where nothing is declared."""
DECLARED = {f'{FIRST_TOKEN_BUDGET}{{le="0.5",{MODEL},{VARIANT}}}': "0.1x60"}
"""90 % within half a second."""
BUDGET_RATIO = f"pagemill_deployment_error_budget_ratio{DEPLOYMENT}"
BUDGETS = {BUDGET_RATIO: "0.005x120"} | USUAL
STRICT = {BUDGET_RATIO: "0.001x60"}
TENANT = 'tenant="a"'
TENANT_FAILED = f'pagemill_gateway_tenant_requests_total{{{TENANT},outcome="no_capacity"}}'
TENANT_REFUSED = f'pagemill_gateway_tenant_requests_total{{{TENANT},outcome="refused"}}'
TENANT_ALLOWED = f"pagemill_gateway_tenant_error_budget_total{{{TENANT}}}"
TENANT_TOKENS = {
    f'pagemill_gateway_tenant_tokens_total{{{TENANT},{MODEL},kind="prompt"}}': "0+30x60",
    f'pagemill_gateway_tenant_tokens_total{{tenant="-",{MODEL},kind="completion"}}': "0+10x60",
}
NONE_READY = {f'pagemill_gateway_endpoints{{phase="ready",{MODEL}}}': "0x60"}
SOME_READY = {f'pagemill_gateway_endpoints{{phase="ready",{MODEL}}}': "1x60"}
STRICT_FIRST_TOKENS = {SOON: "0+80x60", WITHIN: "0+100x60", FIRST_COUNT: "0+100x60"}
BATCH = READY | {
    f"vllm:num_requests_running{OF}": "8x60",
    f"pagemill_engine_max_num_seqs{OF}": "32x60",
    KV: "0.5x60",
}
PAID = {PRICE: "8x60"}
BURN_WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")

IDLE = {f"vllm:num_requests_waiting{OF}": "0x90"}
QUEUE = f"pagemill_gateway_queue_requests{{{MODEL}}}"

RULE_CASES = [
    RuleCase(
        "model:pagemill_waiting_requests:count", READY | {QUEUE: "3x60", f"vllm:num_requests_waiting{OF}": "2x60"}, 5
    ),
    RuleCase("model:pagemill_waiting_requests:count", {QUEUE: "3x60"} | NONE_READY, 3),
    # Engines are ready, but they are not scraped: how many wait there is not known.
    RuleCase("model:pagemill_waiting_requests:count", {QUEUE: "3x60"} | SOME_READY, None),
    RuleCase("model:pagemill_waiting_requests:count", READY, None),
    RuleCase("model:pagemill_replicas_at_maximum:bool", {DESIRED: "3x60", MAX: "3x60"}, 1),
    RuleCase("model:pagemill_replicas_at_maximum:bool", {DESIRED: "2x60", MAX: "3x60"}, 0),
    RuleCase("model:pagemill_replicas_at_maximum:bool", {MAX: "3x60"}, None),
    RuleCase(
        "model:pagemill_first_token_p95:seconds",
        {
            f'{FIRST}_bucket{{le="1",{MODEL}}}': "0+0x60",
            WITHIN: "0+60x60",
            f'{FIRST}_bucket{{le="+Inf",{MODEL}}}': "0+60x60",
        },
        2.425,
    ),
    RuleCase("model:pagemill_first_token_p95:seconds", {WITHIN: "9x60"}, None),
    RuleCase("model:pagemill_engines_ready:count", READY, 1),
    RuleCase("model:pagemill_engines_ready:count", {}, None),
    RuleCase("model:pagemill_kv_used:replicas", READY | {KV: "0.5x60"}, 0.5),
    RuleCase("model:pagemill_kv_used:replicas", ASLEEP | {KV: "0.5x60"}, None),
    RuleCase("model_resource:pagemill_usage:ratio", BATCH, 0.5, 'resource="kv"'),
    RuleCase("model_resource:pagemill_usage:ratio", BATCH, 0.25, 'resource="sequences"'),
    RuleCase("model_resource:pagemill_usage:ratio", ASLEEP | {KV: "0.5x60"}, None),
    RuleCase("model:pagemill_headroom:ratio", BATCH, 0.5),
    RuleCase("model:pagemill_headroom:ratio", ASLEEP, None),
    RuleCase("model:pagemill_replicas_ceiling:count", READY | {MAX: "8x60"}, 8),
    RuleCase("model:pagemill_replicas_ceiling:count", READY, None),
    RuleCase("model:pagemill_replicas_without_gpus:count", {WITHOUT_GPUS: "2x60"}, 2),
    RuleCase("model:pagemill_replicas_without_gpus:count", READY, None),
    # 0.01 per minute: 0.5 after 50 minutes, so 0.9 of one replica is reached 40 minutes later.
    RuleCase("model:pagemill_kv_saturation:minutes", RISING | {MAX: "1x90"}, 40, minutes=50),
    # With one more replica, 0.9 of both is reached 100 minutes later.
    RuleCase("model:pagemill_kv_saturation:minutes", RISING | {MAX: "2x60"}, 130, minutes=50),
    RuleCase("model:pagemill_kv_saturation:minutes", FALLING | {MAX: "1x90"}, None, minutes=50),
    RuleCase("model:pagemill_kv_saturation:minutes", RISING, None, minutes=50),
    # The value doubles every 20 minutes: it is 0.45 after 60, so 0.9 is reached at the next doubling.
    RuleCase("model:pagemill_kv_saturation:minutes", DOUBLING | {MAX: "1x90"}, 20, minutes=60),
    RuleCase("model:pagemill_kv_used:ln", ASLEEP, None),
    RuleCase("model:pagemill_kv_used:ln", RISING, -0.693, minutes=50),
    RuleCase("model:pagemill_replicas_needed:count", RISING, 1, 'horizon="0m"', minutes=50),
    RuleCase("model:pagemill_replicas_needed:count", RISING, 1, 'horizon="30m"', minutes=45),
    RuleCase("model:pagemill_replicas_needed:count", RISING, 2, 'horizon="30m"', minutes=55),
    RuleCase("model:pagemill_replicas_needed:count", RISING, 1, 'horizon="5m"', minutes=50),
    RuleCase("model:pagemill_replicas_needed:count", ASLEEP | {KV: "0x60"}, None),
    RuleCase("model:pagemill_tokens_served:rate5m", {TOKENS: "0+600x60"}, 10),
    RuleCase(
        "model:pagemill_tokens_served:rate5m",
        {f'pagemill_gateway_tokens_total{{kind="cached",{MODEL}}}': "0+6x60"},
        None,
    ),
    RuleCase("model:pagemill_goodput_requests:rate5m", USUAL | {WITHIN: "0+60x60", FIRST_COUNT: "0+60x60"}, 1),
    RuleCase("model:pagemill_goodput_requests:rate5m", {SOON: "0+60x60", FIRST_COUNT: "0+60x60"}, None),
    RuleCase("model:pagemill_waste:ratio", {TOKENS: "0+75x60", f"vllm:generation_tokens_total{OF}": "0+100x60"}, 0.25),
    RuleCase(BUDGET, STRICT_FIRST_TOKENS | USUAL, 0.05, of_series=f'le="2.5",{VARIANT}'),
    RuleCase(BUDGET, STRICT_FIRST_TOKENS | DECLARED, 0.1, of_series=f'le="0.5",{VARIANT}'),
    RuleCase(BUDGET, STRICT_FIRST_TOKENS | {ANSWERED: "0+99x60"}, None),
    RuleCase("model:pagemill_error_budget:ratio", STRICT, 0.001),
    RuleCase("model:pagemill_error_budget:ratio", {ANSWERED: "0+99x60"}, None),
    RuleCase("model:pagemill_goodput_requests:rate5m", STRICT_FIRST_TOKENS | DECLARED, 1.333),
    RuleCase("model:pagemill_waste:ratio", {TOKENS: "5x60", f"vllm:generation_tokens_total{OF}": "5x60"}, None),
    RuleCase("model:pagemill_cost:per_hour", PAID, 8),
    RuleCase("model:pagemill_cost:per_hour", BATCH, None),
    RuleCase("model:pagemill_idle_cost:per_hour", PAID | BATCH, 4),
    RuleCase("model:pagemill_idle_cost:per_hour", BATCH, None),
    # 8 per hour and 3,600 tokens per minute: 216,000 tokens per hour.
    RuleCase("model:pagemill_cost:per_million_tokens", PAID | {TOKENS: "0+3600x60"}, 37.037),
    RuleCase("model:pagemill_cost:per_million_tokens", PAID | {TOKENS: "7x60"}, None),
    *(
        RuleCase(f"model_slo:pagemill_error_budget_burn:rate{window}", series, value, labels, minutes=40)
        for window in BURN_WINDOWS
        for series, value, labels in (
            (BUDGETS | {FAILED: "0+1x40", ANSWERED: "0+99x40"}, 2, 'slo="availability"'),
            (STRICT | {FAILED: "0+1x40", ANSWERED: "0+99x40"}, 10, 'slo="availability"'),
            (BUDGETS | {ANSWERED: "0+99x40", LEFT: "0+50x40", REFUSED: "0+50x40"}, 0, 'slo="availability"'),
            (BUDGETS | {BROKEN: "0+1x40", QUEUED_STREAM: "0+1x40", ANSWERED: "0+98x40"}, 4, 'slo="availability"'),
            (BUDGETS | {QUEUED_STREAM: "0+10x40", WITHIN: "0+90x40", FIRST_COUNT: "0+90x40"}, 2, 'slo="first_token"'),
            (BUDGETS | SLOW_FIRST_TOKENS, 10, 'slo="first_token"'),
            (BUDGETS | STRICT_FIRST_TOKENS, 0, 'slo="first_token"'),
            (STRICT_FIRST_TOKENS | DECLARED, 2, 'slo="first_token"'),
            (BUDGETS | {ANSWERED: "9x40", WITHIN: "9x40", FIRST_COUNT: "9x40"}, None, ""),
            # Without the operator's objectives there is no burn.
            ({FAILED: "0+1x40", ANSWERED: "0+99x40"} | SLOW_FIRST_TOKENS, None, ""),
        )
    ),
    *(
        RuleCase(f"model_slo:pagemill_missed_requests:increase{window}", series, value, labels)
        for window in ("6h", "3d")
        for series, value, labels in (
            ({FAILED: "0+1x60", ANSWERED: "0+99x60"}, 60, 'slo="availability"'),
            (BUDGETS | SLOW_FIRST_TOKENS, 3000, 'slo="first_token"'),
            (SLOW_FIRST_TOKENS, None, 'slo="first_token"'),
        )
    ),
    *(
        RuleCase(f"tenant:pagemill_error_budget_burn:rate{window}", series, value, TENANT, of_model="")
        for window in BURN_WINDOWS
        for series, value in (
            ({TENANT_FAILED: "0+2x60", TENANT_ALLOWED: "0+0.5x60"}, 4),
            ({TENANT_REFUSED: "0+2x60"}, None),
        )
    ),
    *(
        RuleCase(f"tenant:pagemill_missed_requests:increase{window}", series, value, TENANT, of_model="")
        for window in ("6h", "3d")
        for series, value in (
            ({TENANT_FAILED: "0+2x60", TENANT_ALLOWED: "0+0.5x60"}, 120),
            ({TENANT_FAILED: "0+2x60"}, None),
        )
    ),
    RuleCase("tenant_model:pagemill_cost:per_hour", PAID | TENANT_TOKENS, 6, TENANT),
    RuleCase("tenant_model:pagemill_cost:per_hour", TENANT_TOKENS, None, TENANT),
]

ALERT_CASES = [
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | {FAILED: "0+10x60", ANSWERED: "0+90x60"}, True),
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | SLOW_FIRST_TOKENS | {ANSWERED: "0+100x60"}, True),
    # Few failures, and no others before them: an objective counts from the first one on.
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | {FAILED: "0x50 1 2 3 4 5x9", ANSWERED: "0+0.1x60"}, True),
    AlertCase("PagemillErrorBudgetBurnsFast", {TENANT_FAILED: "0+1x60", TENANT_ALLOWED: "0+0.05x60"}, True),
    AlertCase("PagemillErrorBudgetBurnsFast", {TENANT_FAILED: "0+1x60", TENANT_ALLOWED: "0+1x60"}, False),
    # Of few requests, one failure is no reason to wake anybody up.
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | {FAILED: "0x50 1x10", ANSWERED: "0+0.1x60"}, False),
    # In the short window the incident has ended: a page would come too late.
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | {FAILED: "0+10x40 400x60", ANSWERED: "0+90x100"}, False, 90),
    AlertCase("PagemillErrorBudgetBurnsFast", BUDGETS | {FAILED: "0+1x60", ANSWERED: "0+99x60"}, False),
    AlertCase("PagemillErrorBudgetBurnsSlowly", BUDGETS | {FAILED: "0+1x60", ANSWERED: "0+99x60"}, True),
    AlertCase("PagemillErrorBudgetBurnsSlowly", BUDGETS | {FAILED: "0+1x60", ANSWERED: "0+999x60"}, False),
    # Three failures among few requests of a day.
    AlertCase("PagemillErrorBudgetBurnsSlowly", BUDGETS | {FAILED: "0x20 3x40", ANSWERED: "0+1x60"}, False),
    AlertCase("PagemillObjectivesMissing", SOME_READY, True),
    AlertCase("PagemillObjectivesMissing", SOME_READY | BUDGETS | {MAX: "1x60"}, False),
    AlertCase("PagemillObjectivesMissing", SOME_READY | {"pagemill_gateway_catalog_own": "1x60"}, False),
    AlertCase("PagemillObjectivesMissing", SOME_READY | {"pagemill_gateway_catalog_own": "0x60"}, True),
    AlertCase("PagemillSaturationSoon", READY | {KV: "0+0.01x90", MAX: "1x90"}, True, 75),
    AlertCase("PagemillSaturationSoon", READY | {KV: "0+0.01x90", MAX: "8x90"}, False, 75),
    AlertCase("PagemillSaturationSoon", FALLING, False),
    AlertCase("PagemillSaturationSoon", READY | {KV: "0+0.0002x90", MAX: "1x90"}, False, 75),
    AlertCase("PagemillSaturationSoon", READY | IDLE | {QUEUE: "0x60 2+2x30"}, True, 75),
    AlertCase("PagemillNoHeadroom", READY | {KV: "0.95x60"}, True),
    AlertCase("PagemillNoHeadroom", READY | IDLE | {KV: "0.85x60", QUEUE: "0x60"}, False),
    # Requests wait; the KV cache in use says little.
    AlertCase("PagemillNoHeadroom", READY | IDLE | {KV: "0.4x60", QUEUE: "0x56 32x8", MAX: "1x60"}, True),
    # Two may run, but no node has GPUs for the second.
    AlertCase(
        "PagemillNoHeadroom",
        READY | IDLE | {KV: "0.4x60", QUEUE: "0x56 32x8", MAX: "2x60", WITHOUT_GPUS: "1x60"},
        True,
    ),
    AlertCase("PagemillNoHeadroom", READY | IDLE | {KV: "0.4x60", QUEUE: "0x57 5 0 5 0 5", MAX: "1x60"}, False),
    # Another replica can start; ten minutes are too long for that.
    AlertCase("PagemillNoHeadroom", READY | IDLE | {KV: "0.4x60", QUEUE: "0x56 32x8", MAX: "2x60"}, False),
    AlertCase("PagemillNoHeadroom", READY | IDLE | {KV: "0.4x60", QUEUE: "0x45 32x20", MAX: "2x60"}, True),
    AlertCase("PagemillNoHeadroom", ASLEEP | {KV: "0.95x60"}, False),
    AlertCase("PagemillRolloutStuck", {DESIRED: "3x60", UPDATED: "2x60"}, True),
    AlertCase("PagemillRolloutStuck", {DESIRED: "3x60", UPDATED: "2x10 3x50"}, False),
    AlertCase("PagemillEngineStateStale", {f'pagemill_gateway_endpoints{{{MODEL},phase="stale"}}': "1x60"}, True),
    AlertCase("PagemillEngineStateStale", {f'pagemill_gateway_endpoints{{{MODEL},phase="ready"}}': "1x60"}, False),
    AlertCase("PagemillPoisonRequests", {BLAMED: "0x50 1x10"}, True),
    AlertCase("PagemillPoisonRequests", {BLAMED: "1x60", CLEARED: "0x50 1x10"}, False),
    AlertCase("PagemillGatewayDown", {"pagemill_gateway_ready": "0x60"}, True),
    AlertCase("PagemillGatewayDown", {}, True),
    AlertCase(
        "PagemillGatewayDown",
        {'pagemill_gateway_ready{instance="a"}': "0x60", 'pagemill_gateway_ready{instance="b"}': "1x60"},
        False,
    ),
    AlertCase("PagemillOperatorDown", {'leader_election_master_status{name="llmdeployment"}': "0x60"}, True),
    AlertCase("PagemillOperatorDown", {'leader_election_master_status{name="llmdeployment"}': "1x60"}, False),
]
