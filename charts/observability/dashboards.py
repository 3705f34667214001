"""The five dashboards: Fleet capacity, Model, Autoscaling, Gateway and Operator. Each is a list of panels.

`panels` makes Grafana's JSON of them; recorded series come from `rules`.
"""

from __future__ import annotations

from observability import rules
from observability.panels import Page, Panel, engine, of_model, or_zero, per_second, process, quantiles, recorded, total

MODEL = "{{model}}"
CURRENCY = "none"
"""Grafana's unit of prices: they have the currency of `spec.cost`."""
ENGINES = "label_values(pagemill_engine_ready, model_name)"
ENGINE, GATEWAY = engine("pagemill_engine_ready"), process("pagemill_gateway_ready")
GATEWAYS = "label_values(pagemill_gateway_endpoints, model)"


def fleet() -> Page:
    about = "Free capacity of the fleet, how long it suffices, and its cost."
    rows = {"Now": _now(), "Capacity": _capacity(), "Work and cost": _work()}
    return Page("pagemill-fleet", "Pagemill / Fleet capacity", about, "pagemill_engine_ready", ENGINES, rows)


def _stat(title: str, description: str, unit: str, series: str) -> Panel:
    """Return the panel of a recorded series that shows its present value for each model."""
    return Panel(title, description, unit, [(recorded(series), MODEL)], is_stat=True)


def _now() -> list[Panel]:
    return [
        _stat(
            "Headroom",
            "Free share of the scarcer of KV cache and sequence slots, over the ready engines.",
            "percentunit",
            rules.HEADROOM,
        ),
        _stat(
            "Minutes until saturation",
            "Minutes until 90 % of the KV cache of the maximum of replicas is used, at the last hour's trend. Empty: "
            "the use does not grow.",
            "m",
            rules.SATURATION,
        ),
        _stat(
            "Waiting",
            "Requests that wait in gateways and engines until there is capacity.",
            "none",
            rules.WAITING,
        ),
        _stat(
            "First tokens, 95th percentile",
            "Time to first token that clients of gateways see, in the last five minutes. Empty: no stream began.",
            "s",
            rules.FIRST_TOKEN,
        ),
        _stat(
            "At the maximum",
            "1: the maximum of replicas is ordered, so that no more can follow the load.",
            "none",
            rules.AT_MAXIMUM,
        ),
        _stat(
            "Without GPUs",
            "Replicas that wait because no node has free GPUs.",
            "none",
            rules.WITHOUT_GPUS,
        ),
        _stat(
            "Cost per hour",
            "Price of all pods of deployments with spec.cost.",
            CURRENCY,
            rules.COST,
        ),
    ]


def _capacity() -> list[Panel]:
    return [
        Panel(
            "Headroom over time",
            "Free share of the capacity.",
            "percentunit",
            [(recorded(rules.HEADROOM), MODEL)],
            max=1,
        ),
        Panel(
            "Use by resource",
            "KV cache that running requests hold, and sequences that run, as shares of the capacity.",
            "percentunit",
            [(recorded(rules.USAGE), "{{model}} {{resource}}")],
            max=1,
        ),
        Panel(
            "Minutes until saturation over time",
            "At the trend of the last hour; at most a day.",
            "m",
            [(recorded(rules.SATURATION), MODEL)],
        ),
        Panel(
            "Replicas needed",
            "Replicas at which the KV cache is 80 % full, now and in 5 and 30 minutes, beside the maximum.",
            "none",
            [(recorded(rules.NEEDED), "{{model}} in {{horizon}}"), (recorded(rules.CEILING), "{{model}} most")],
        ),
        Panel(
            "KV cache in use",
            "In units of one replica's cache, beside the engines that are ready.",
            "none",
            [(recorded(rules.KV_USED), "{{model}} used"), (recorded(rules.READY), "{{model}} ready")],
        ),
        Panel("GPUs held", "GPUs of all pods that exist, ready or not.", "none", [
            (total(of_model("pagemill_deployment_gpus"), "model"), MODEL)
        ]),
    ]  # fmt: skip


def _work() -> list[Panel]:
    return [
        Panel("Tokens served", "Prompt and generated tokens.", "ops", [(recorded(rules.SERVED), MODEL)]),
        Panel(
            "Goodput",
            "Requests whose first token came within the objective of their deployment "
            "(`spec.autoscaling.slo`; 2.5 s without one).",
            "reqps",
            [(recorded(rules.GOODPUT), MODEL)],
        ),
        Panel(
            "Waste",
            "Share of the generated tokens that no client of a gateway got: lost with engines, aborted, or sent to "
            "clients that call engines directly.",
            "percentunit",
            [(recorded(rules.WASTE), MODEL)],
            max=1,
        ),
        Panel(
            "Cost of a million tokens",
            "Price of the pods over the prompt and generated tokens of the last hour.",
            CURRENCY,
            [(recorded(rules.TOKEN_COST), MODEL)],
        ),
        Panel("Cost of headroom", "Price of the free capacity per hour.", CURRENCY, [
            (recorded(rules.IDLE_COST), MODEL)
        ]),
        Panel(
            "Cost by tenant",
            "Price of the pods for an hour, by each tenant's share of the tokens of the last hour; tenant `-`: "
            "requests without one.",
            CURRENCY,
            [(recorded(rules.TENANT_COST), "{{tenant}} {{model}}")],
        ),
        Panel(
            "Error budget burn of tenants",
            "The same for tenants whose keys have an objective. Empty: none has.",
            "none",
            [(f'{rules.tenant_burn("1h")}{{tenant=~".+"}}', "{{tenant}}")],
        ),
        Panel(
            "Error budget burn",
            "Rate at which the budget of 30 days is used up, as a multiple of the allowed rate, over the last hour.",
            "none",
            [(recorded(rules.burn("1h")), "{{model}} {{slo}}")],
        ),
    ]  # fmt: skip


def model() -> Page:
    name = "{{model_name}}"
    latency = [
        Panel(
            "Time to first token at engines",
            "From arrival at the engine to the first token.",
            "s",
            quantiles(engine("vllm:time_to_first_token_seconds_bucket"), "model_name"),
        ),
        Panel(
            "Time per output token",
            "Mean time per token after the first, by request.",
            "s",
            quantiles(engine("vllm:request_time_per_output_token_seconds_bucket"), "model_name"),
        ),
        Panel(
            "Time in the engine's queue",
            "From arrival at the engine to first scheduling.",
            "s",
            quantiles(engine("vllm:request_queue_time_seconds_bucket"), "model_name"),
        ),
    ]
    accepted = per_second(engine("vllm:spec_decode_num_accepted_tokens_total"), "model_name")
    proposed = per_second(engine("vllm:spec_decode_num_draft_tokens_total"), "model_name")
    work = [
        Panel("Requests at engines", "Requests that run and that wait.", "none", [
            (total(engine("vllm:num_requests_running"), "model_name"), f"{name} running"),
            (total(engine("vllm:num_requests_waiting"), "model_name"), f"{name} waiting"),
        ]),
        Panel("Tokens per second", "Prompt tokens admitted and tokens generated.", "ops", [
            (per_second(engine("vllm:prompt_tokens_total"), "model_name"), f"{name} prompt"),
            (per_second(engine("vllm:generation_tokens_total"), "model_name"), f"{name} generated"),
        ]),
        Panel("Tokens in a step", "Prompt and decode tokens that one step computes.", "none",
              quantiles(engine("vllm:iteration_tokens_total_bucket"), "model_name")),
        Panel("Step time", "Duration of one engine step.", "s",
              quantiles(engine("pagemill_engine_step_seconds_bucket"), "model_name")),
        Panel("Ended requests", "By finish reason.", "reqps", [
            (per_second(engine("vllm:request_success_total"), "model_name", "finished_reason"),
             f"{name} {{{{finished_reason}}}}"),
        ]),
        Panel("Aborted requests", "Requests aborted before their end, by cause.", "reqps", [
            (or_zero(per_second(engine("pagemill_engine_requests_aborted_total"), "model_name", "reason"), ENGINE),
             f"{name} {{{{reason}}}}"),
        ]),
        Panel("Preemptions", "Requests that lost their KV blocks and are computed again.", "ops", [
            (per_second(engine("vllm:num_preemptions_total"), "model_name"), name)
        ]),
        Panel("Accepted proposals", "Share of the proposed tokens that were sampled.", "percentunit", [
            (f"{accepted} / ({proposed} > 0)", name)
        ], max=1),
        Panel("Accepted by place", "Proposed tokens that were sampled, by their place in the proposal.", "ops", [
            (per_second(engine("vllm:spec_decode_num_accepted_tokens_per_pos_total"), "position"), "{{position}}")
        ]),
        Panel("Gain of proposals", "Time of steps that proposed tokens have saved since the engines' starts.", "s", [
            (total(engine("pagemill_engine_speculation_gain_seconds"), "model_name"), name)
        ]),
    ]  # fmt: skip
    found = per_second(engine("vllm:prefix_cache_hits_total"), "model_name")
    looked_up = per_second(engine("vllm:prefix_cache_queries_total"), "model_name")
    cache = [
        Panel("KV cache", "Held by requests (active), cached and evictable, and free.", "bytes", [
            (total(engine("pagemill_engine_kv_bytes"), "model_name", "state"), f"{name} {{{{state}}}}")
        ]),
        Panel("Prefix cache hits", "Share of the prompt tokens that were found in the prefix cache.", "percentunit", [
            (f"{found} / ({looked_up} > 0)", name)
        ], max=1),
        Panel("Predicted prefix hits", "Answers by the gateway's prediction: exact, over or under.", "ops", [
            (per_second(of_model("pagemill_gateway_cached_token_predictions_total"), "model", "outcome"),
             "{{model}} {{outcome}}"),
        ]),
    ]  # fmt: skip
    about = "Latency, batch and KV cache of each model's engines."
    adapters = [
        Panel("Adapters", "LoRA adapters of each replica by state, also with requests that run or wait.", "none", [
            (total(engine("pagemill_engine_adapters"), "model_name", "pod", "state"), "{{pod}} {{state}}")
        ]),
        Panel("Loads and evictions of adapters", "Adapters read into memory, and dropped from it for others.", "ops", [
            (per_second(engine("pagemill_engine_adapter_loads_total"), "model_name"), f"{name} loads"),
            (per_second(engine("pagemill_engine_adapter_evictions_total"), "model_name"), f"{name} evictions"),
        ]),
        Panel("Requests by adapter", "Ended requests for adapters.", "reqps", [
            (per_second(of_model("pagemill_gateway_adapter_requests_total"), "adapter", "outcome"),
             "{{adapter}} {{outcome}}"),
        ]),
    ]  # fmt: skip
    computed = engine("pagemill_engine_rank_compute_seconds_total")
    steps = per_second(engine("pagemill_engine_step_seconds_count"), "instance")
    ranks = [
        Panel("Ranks of replicas", "Processes of replicas that several compute together.", "none", [
            (f"count by (instance) ({computed})", "{{instance}}")
        ]),
        Panel("Time in which ranks compute", "Share of the time, without waits for other ranks.", "percentunit", [
            (per_second(computed, "instance", "rank"), "{{instance}} rank {{rank}}")
        ], max=1),
        Panel("Time of ranks in a step", "Without waits: all wait for the longest. Ranks hold unequal parts.", "s", [
            (f"{per_second(computed, 'instance', 'rank')} / on (instance) group_left () ({steps} > 0)",
             "{{instance}} rank {{rank}}"),
        ]),
    ]  # fmt: skip
    rows = {"Latency": latency, "Work": work, "KV cache": cache, "Adapters": adapters, "Ranks": ranks}
    return Page("pagemill-model", "Pagemill / Model", about, "pagemill_engine_ready", ENGINES, rows)


def autoscaling() -> Page:
    forecast, needed = (recorded(rules.NEEDED, f'horizon="{minutes}m"') for minutes in (30, 0))
    replicas = [
        Panel("Replicas", "Desired, ready, and the maximum.", "none", [
            (total(of_model("pagemill_deployment_desired_replicas"), "variant"), "{{variant}} desired"),
            (total(of_model("pagemill_deployment_ready_replicas"), "variant"), "{{variant}} ready"),
            (total(of_model("pagemill_deployment_max_replicas"), "variant"), "{{variant}} maximum"),
        ]),
        Panel("Current spec", "Ready replicas that run the current spec, beside those desired.", "none", [
            (total(of_model("pagemill_deployment_updated_replicas"), "variant"), "{{variant}} updated"),
            (total(of_model("pagemill_deployment_desired_replicas"), "variant"), "{{variant}} desired"),
        ]),
        Panel("Decided or recommended", "Replicas that the autoscaler has decided on, or recommends.", "none", [
            (total(process("pagemill_autoscaler_replicas"), "variant"), "{{variant}}")
        ]),
        Panel("Forecast", "Replicas needed at the trend of the last 30 minutes.", "none", [
            (recorded(rules.NEEDED), "{{model}} in {{horizon}}")
        ]),
        Panel("Forecast error", "Replicas forecast 30 minutes ago for now, minus those needed now.", "none", [
            (f"{forecast} offset 30m - ignoring (horizon) {needed}", MODEL),
        ]),
        Panel("Waiting in gateways", "Requests that wait in gateways until an engine has capacity.", "none", [
            (total(of_model("pagemill_gateway_queue_requests"), "model"), MODEL)
        ]),
    ]  # fmt: skip
    starts = [
        Panel("Cold starts by phase, median", "Starts of engine pods, from creation to readiness.", "s", [
            (f"histogram_quantile(0.5, {_phase_rates()})", "{{phase}}")
        ]),
        Panel("Cold starts by phase, 95th percentile", "Starts of engine pods, from creation to readiness.", "s", [
            (f"histogram_quantile(0.95, {_phase_rates()})", "{{phase}}")
        ]),
        Panel("Engines by phase", "Engines as gateways see them.", "none", [
            (f'max by (model, phase) ({of_model("pagemill_gateway_endpoints")})', "{{model}} {{phase}}")
        ]),
    ]  # fmt: skip
    about = "Replicas desired, ready and needed, and how long starts take."
    rows = {"Replicas": replicas, "Starts": starts}
    return Page("pagemill-autoscaling", "Pagemill / Autoscaling", about, "pagemill_gateway_endpoints", GATEWAYS, rows)


def _phase_rates() -> str:
    return per_second(process("pagemill_cold_start_phase_seconds_bucket"), "le", "phase")


def gateway() -> Page:
    requests = [
        Panel("Requests", "Requests by outcome; model `unknown`: they ended before their model was known.", "reqps", [
            (per_second(of_model("pagemill_gateway_outcomes_total"), "model", "outcome"), "{{model}} {{outcome}}")
        ]),
        Panel("Time to first token", "From the request's headers to its first content.", "s",
              quantiles(of_model("pagemill_gateway_time_to_first_token_seconds_bucket"), "model")),
        Panel("Request time", "From the request's headers to its last byte.", "s",
              quantiles(of_model("pagemill_gateway_request_seconds_bucket"), "model")),
        Panel("In flight", "Requests being served, including those that wait.", "none", [
            (total(of_model("pagemill_gateway_in_flight_requests"), "model"), MODEL)
        ]),
        Panel("Refused", "Requests refused on arrival by error code.", "reqps", [
            (or_zero(per_second(process("pagemill_gateway_requests_rejected_total"), "code"), GATEWAY), "{{code}}"),
        ]),
        Panel("Limited tenants", "Requests refused with 429 by the limits of keys; tenant `-`: keys without one.",
              "reqps", [
            (or_zero(per_second(process("pagemill_gateway_limited_total"), "tenant", "reason"), GATEWAY),
             "{{tenant}} {{reason}}"),
        ]),
        Panel("Tokens by tenant", "Charged prompt and completion tokens; tenant `-`: requests without one.", "ops", [
            (per_second(of_model("pagemill_gateway_tenant_tokens_total"), "tenant", "model", "kind"),
             "{{tenant}} {{model}} {{kind}}"),
        ]),
        Panel("Requests by tenant", "Ended requests by outcome.", "reqps", [
            (per_second(process("pagemill_gateway_tenant_requests_total"), "tenant", "outcome"),
             "{{tenant}} {{outcome}}"),
        ]),
    ]  # fmt: skip
    queue = [
        Panel("Waiting in gateways", "Requests that wait in gateways until an engine has capacity.", "none", [
            (total(of_model("pagemill_gateway_queue_requests"), "model"), MODEL)
        ]),
        Panel("Time in the queue", "Waiting time of requests that waited and were served.", "s",
              quantiles(of_model("pagemill_gateway_queue_seconds_bucket"), "model")),
        Panel("End of waiting", "By outcome: served, shed, full, timeout, deadline, failed or left.", "reqps", [
            (per_second(of_model("pagemill_gateway_queue_ended_total"), "model", "outcome"), "{{model}} {{outcome}}")
        ]),
    ]  # fmt: skip
    routing = [
        Panel("Error of predicted first tokens", "Error of the time that routing compared, as a share of the measured.",
              "percentunit",
              quantiles(of_model("pagemill_gateway_ttft_prediction_error_ratio_bucket"), "model")),
        Panel("Routing", "Time to choose an endpoint.", "s",
              quantiles(of_model("pagemill_gateway_routing_seconds_bucket"), "model")),
        Panel("Decisions", "Routing decisions by policy and by what was known of the chosen endpoint.", "ops", [
            (per_second(of_model("pagemill_gateway_routing_decisions_total"), "policy", "basis"),
             "{{policy}} {{basis}}"),
        ]),
    ]  # fmt: skip
    failures = [
        Panel("Attempts at engines", "Attempts by outcome.", "reqps", [
            (per_second(of_model("pagemill_gateway_upstream_attempts_total"), "model", "outcome"),
             "{{model}} {{outcome}}"),
        ]),
        Panel("Retries, migrations and broken streams", "Restarted requests, answers that another engine continued, "
              "and streams that ended with an error.", "ops", [
            (per_second(of_model("pagemill_gateway_upstream_retries_total"), "model"), "{{model}} retries"),
            (per_second(of_model("pagemill_gateway_migrations_total"), "model"), "{{model}} migrations"),
            (per_second(of_model("pagemill_gateway_outcomes_total", 'outcome="failed_after_first_token"'), "model"),
             "{{model}} broken"),
        ]),
        Panel("Probes for poison requests", "Probes of requests with which engines crashed, by outcome.", "ops", [
            (or_zero(per_second(of_model("pagemill_gateway_poison_probes_total"), "model", "outcome"), GATEWAY),
             "{{model}} {{outcome}}"),
        ]),
    ]  # fmt: skip
    about = "Requests as clients see them: rates, errors, waiting, routing, retries and migrations."
    rows = {"Requests": requests, "Queue": queue, "Routing": routing, "Failures": failures}
    return Page("pagemill-gateway", "Pagemill / Gateway", about, "pagemill_gateway_ready", GATEWAYS, rows)


def operator() -> Page:
    reconciles = [
        Panel("Reconciles", "Reconciles by result: success, requeue or error.", "ops", [
            (per_second(process("controller_runtime_reconcile_total"), "result"), "{{result}}")
        ]),
        Panel("Reconcile time", "Duration of one reconcile.", "s",
              quantiles(process("controller_runtime_reconcile_time_seconds_bucket"))),
        Panel("Due deployments", "Deployments that are due for a reconcile.", "none", [
            (total(process("workqueue_depth"), "name"), "{{name}}")
        ]),
        Panel("Time until a reconcile", "How long a due deployment waited for a worker.", "s",
              quantiles(process("workqueue_queue_duration_seconds_bucket"))),
        Panel("Writes", "Objects written, by kind and verb.", "ops", [
            (per_second(process("pagemill_operator_writes_total"), "kind", "verb"), "{{kind}} {{verb}}")
        ]),
        Panel("API server", "Requests by status code.", "reqps", [
            (per_second(process("rest_client_requests_total"), "code"), "{{code}}")
        ]),
    ]  # fmt: skip
    health = [
        Panel("Leader", "1 for the operator that is the leader.", "none", [
            (total(process("leader_election_master_status"), "instance"), "{{instance}}")
        ]),
        Panel("Quietest watch", "Time since a watch last received anything, by kind.", "s", [
            (f'max by (resource) ({process("pagemill_operator_watch_age_seconds")})', "{{resource}}")
        ]),
        Panel("Deployments", "LLMDeployments that are served.", "none", [
            (f'max by (instance) ({process("pagemill_operator_deployments")})', "{{instance}}")
        ]),
    ]  # fmt: skip
    about = "Leadership of the operator, its reconciles, and its writes."
    rows = {"Reconciles": reconciles, "Health": health}
    models = "label_values(pagemill_deployment_desired_replicas, model)"
    return Page("pagemill-operator", "Pagemill / Operator", about, "leader_election_master_status", models, rows)


def all_pages() -> list[Page]:
    return [fleet(), model(), autoscaling(), gateway(), operator()]
