"""Every Prometheus metric of engine and gateway as data: name, help, labels and buckets.

Engine pods export vLLM's core names with vLLM's meaning and buckets, so dashboards, KEDA recipes and inference gateways
written for vLLM work unchanged, and `pagemill_engine_*` for facts that only this engine has; gateways export
`pagemill_gateway_*`. Processes make their objects with `Metrics`; the reference page is generated from the same specs.
Nothing here measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as ExportedSample
from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]
Wrapped = TypeVar("Wrapped", bound=MetricWrapperBase)

_FAST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
_SLOW_S = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_S = (*_FAST_S, *_SLOW_S, 160.0, 640.0, 2560.0)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, *_SLOW_S)
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
_MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_LATENCY_S = (*_SECONDS, *_MINUTES)
_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0)
_FINE_TTFT_S = tuple(sorted({*_TTFT_S, 0.03, 0.05, 0.15, 0.2}))
_FINE_LATENCY_S = (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, *_LATENCY_S)
"""Buckets of gateways, fine enough for objectives of 50 ms. Engines keep the bounds that dashboards of vLLM use."""
_QUEUE_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_LATENCY_S)
"""These bounds, and some below them: most requests wait for less."""
_SHORT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MetricSpec(NamedTuple):
    """One metric. `name` is the name in code; a counter's series end in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


ENGINE_METRICS: list[MetricSpec] = []
GATEWAY_METRICS: list[MetricSpec] = []


def _vllm(
    kind: Kind, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> MetricSpec:
    spec = MetricSpec(f"vllm:{name}", kind, help, ("model_name", "engine", *labels), buckets)
    ENGINE_METRICS.append(spec)
    return spec


def _engine(
    kind: Kind, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> MetricSpec:
    spec = MetricSpec(f"pagemill_engine_{name}", kind, help, ("model_name", *labels), buckets)
    ENGINE_METRICS.append(spec)
    return spec


def _gateway(
    kind: Kind, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> MetricSpec:
    spec = MetricSpec(f"pagemill_gateway_{name}", kind, help, labels, buckets)
    GATEWAY_METRICS.append(spec)
    return spec


# Engine pods: names of vLLM.
NUM_REQUESTS_RUNNING = _vllm("gauge", "num_requests_running", "Requests in the running batch.")
NUM_REQUESTS_WAITING = _vllm("gauge", "num_requests_waiting", "Requests that wait to enter the running batch.")
KV_CACHE_USAGE = _vllm(
    "gauge",
    "kv_cache_usage_perc",
    "Share of the KV cache's bytes that running requests hold, 0 to 1; cached blocks count as free.",
)
CACHE_CONFIG_INFO = _vllm(
    "gauge",
    "cache_config_info",
    "Always 1; the labels describe the KV cache.",
    ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
)
PROMPT_TOKENS = _vllm("counter", "prompt_tokens", "Prompt tokens of admitted requests.")
GENERATION_TOKENS = _vllm("counter", "generation_tokens", "Tokens generated.")
NUM_PREEMPTIONS = _vllm("counter", "num_preemptions", "Requests that lost their blocks and are computed again.")
SPEC_DRAFTS = _vllm("counter", "spec_decode_num_drafts", "Proposals of one token or more that a step verified.")
SPEC_DRAFT_TOKENS = _vllm("counter", "spec_decode_num_draft_tokens", "Tokens proposed.")
SPEC_ACCEPTED = _vllm("counter", "spec_decode_num_accepted_tokens", "Proposed tokens that were sampled.")
SPEC_ACCEPTED_AT = _vllm(
    "counter", "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens that were sampled, by their place.",
    ("position",),
)  # fmt: skip
LORA_REQUESTS_INFO = _vllm(
    "gauge",
    "lora_requests_info",
    "Time at which the adapters with running and with waiting requests last changed; the labels name them.",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
)
REQUEST_SUCCESS = _vllm(
    "counter",
    "request_success",
    "Requests that ended, by cause; of several choices, by the first of error, abort, length, stop.",
    ("finished_reason",),
)
PREFIX_CACHE_QUERIES = _vllm("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
PREFIX_CACHE_HITS = _vllm("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.")
TIME_TO_FIRST_TOKEN = _vllm(
    "histogram", "time_to_first_token_seconds", "From arrival to the first token.", buckets=_TTFT_S
)
INTER_TOKEN_LATENCY = _vllm(
    "histogram", "inter_token_latency_seconds", "Between two deliveries of tokens of one choice.", buckets=_ITL_S
)
TIME_PER_OUTPUT_TOKEN = _vllm(
    "histogram", "request_time_per_output_token_seconds", "Mean time per token after the first, by request.",
    buckets=_ITL_S,
)  # fmt: skip
E2E_REQUEST_LATENCY = _vllm(
    "histogram", "e2e_request_latency_seconds", "From arrival to the last token.", buckets=_LATENCY_S
)
REQUEST_QUEUE_TIME = _vllm(
    "histogram", "request_queue_time_seconds", "From arrival to first scheduling.", buckets=_QUEUE_S
)
REQUEST_PREFILL_TIME = _vllm(
    "histogram", "request_prefill_time_seconds", "From first scheduling to the first token.", buckets=_LATENCY_S
)
REQUEST_DECODE_TIME = _vllm(
    "histogram", "request_decode_time_seconds", "From the first token to the last.", buckets=_LATENCY_S
)
REQUEST_INFERENCE_TIME = _vllm(
    "histogram", "request_inference_time_seconds", "From first scheduling to the last token.", buckets=_LATENCY_S
)
REQUEST_PROMPT_TOKENS = _vllm("histogram", "request_prompt_tokens", "Prompt tokens by request.", buckets=_TOKENS)
REQUEST_GENERATION_TOKENS = _vllm(
    "histogram", "request_generation_tokens", "Generated tokens by request.", buckets=_TOKENS
)
REQUEST_PARAMS_N = _vllm("histogram", "request_params_n", "The parameter n by request.", buckets=_CHOICES)
REQUEST_PARAMS_MAX_TOKENS = _vllm(
    "histogram", "request_params_max_tokens", "The parameter max_tokens by request.", buckets=_TOKENS
)
REQUEST_NUM_PREEMPTIONS = _vllm("histogram", "request_num_preemptions", "Preemptions by request.", buckets=_PREEMPTIONS)
ITERATION_TOKENS = _vllm("histogram", "iteration_tokens_total", "Tokens computed by one step.", buckets=_STEP_TOKENS)

# Engine pods: names of Pagemill.
ENGINE_INFO = _engine(
    "gauge",
    "info",
    "Always 1; the labels describe the engine.",
    ("version", "weights_digest", "kv_dtype", "device", "compute", "ranks", "nodes"),
)
ENGINE_RANK_SECONDS = _engine("counter", "rank_compute_seconds", "Time without waits for other ranks.", ("rank",))
ENGINE_READY = _engine("gauge", "ready", "1 when requests are accepted, else 0.")
ENGINE_DRAINING = _engine("gauge", "draining", "1 while no new requests are accepted and running ones finish.")
ENGINE_SLEEPING = _engine("gauge", "sleeping", "1 while the engine sleeps: weights in memory, no KV cache.")
ENGINE_WAKE_SECONDS = _engine(
    "histogram", "wake_seconds", "From the call to wake up to a first token.", buckets=_SHORT_S
)
ENGINE_LOAD_SECONDS = _engine("gauge", "load_seconds", "Time that each phase of starting took.", ("phase",))
ENGINE_KV_BYTES = _engine(
    "gauge", "kv_bytes", "Bytes of the KV cache by kind and state: active, evictable (cached), free.", ("kind", "state")
)
ENGINE_MAX_NUM_SEQS = _engine("gauge", "max_num_seqs", "Sequences that may run at once.")
ENGINE_WAITING_TOKENS = _engine("gauge", "waiting_tokens", "Prompt tokens not yet computed.")
ENGINE_CONTEXT_TOKENS = _engine("gauge", "context_tokens", "Context tokens of running requests.")
ENGINE_STEP_SECONDS = _engine("histogram", "step_seconds", "Duration of one engine step.", buckets=_SHORT_S)
ENGINE_SPECULATION_GAIN = _engine(
    "gauge",
    "speculation_gain_seconds",
    "Time of steps that proposed tokens have saved since the start, by the predictions they were chosen by.",
)
ENGINE_STEP_ERROR_P50 = _engine("gauge", "step_prediction_error_p50", "Median relative error of step-time predictions.")
ENGINE_STEP_ERROR_P95 = _engine(
    "gauge", "step_prediction_error_p95", "95th percentile of the relative error of step-time predictions."
)
ENGINE_ADAPTERS = _engine(
    "gauge",
    "adapters",
    "LoRA adapters by state: fetching, known, refused; resident (in memory) or loading; running or waiting (requests).",
    ("state",),
)
ENGINE_ADAPTER_LOADS = _engine("counter", "adapter_loads", "Loads of LoRA adapters into memory.")
ENGINE_ADAPTER_EVICTIONS = _engine("counter", "adapter_evictions", "LoRA adapters dropped from memory for others.")
ENGINE_ADAPTER_LOAD_SECONDS = _engine("gauge", "adapter_load_seconds", "Time that the latest load took.")
ENGINE_REJECTED = _engine("counter", "requests_rejected", "Requests refused, by error code.", ("code",))
ENGINE_ABORTED = _engine("counter", "requests_aborted", "Requests aborted before their end, by cause.", ("reason",))
ENGINE_FAILED = _engine("counter", "requests_failed", "Requests that failed inside the engine.")
ENGINE_HTTP_REQUESTS = _engine("counter", "http_requests", "HTTP requests answered.", ("route", "status"))
ENGINE_STATE_STREAMS = _engine("gauge", "state_streams", "Gateways connected to the state stream.")

# Gateway.
GATEWAY_REQUESTS = _gateway(
    "counter",
    "requests",
    "Requests by outcome, each counted once at its end; model `unknown`: it ended before its model was known; empty: "
    "probes.",
    ("model", "variant", "route", "status", "stream", "outcome"),
)
GATEWAY_OUTCOMES = _gateway(
    "counter",
    "outcomes",
    "The same requests without probes; all series of a known model begin at 0, so that objectives miss no first "
    "failure.",
    ("model", "stream", "outcome"),
)
GATEWAY_IN_FLIGHT = _gateway("gauge", "in_flight_requests", "Requests in progress, including waiting ones.", ("model",))
GATEWAY_BODY_BYTES = _gateway(
    "gauge", "in_flight_body_bytes", "Bytes of requests in progress and of their unread answers."
)
GATEWAY_REQUEST_SECONDS = _gateway(
    "histogram",
    "request_seconds",
    "From the request's headers to its last byte.",
    ("model", "variant"),
    _FINE_LATENCY_S,
)
GATEWAY_TTFT_SECONDS = _gateway(
    "histogram",
    "time_to_first_token_seconds",
    "From the request's headers to its first content.",
    ("model", "variant"),
    _FINE_TTFT_S,
)
GATEWAY_PREPARE_SECONDS = _gateway(
    "histogram", "prepare_seconds", "Parsing, rendering and tokenizing one request.", ("model",), _SHORT_S
)
GATEWAY_ROUTING_SECONDS = _gateway(
    "histogram", "routing_seconds", "Choosing the endpoint of one request.", ("model",), _SHORT_S
)
GATEWAY_ROUTING_DECISIONS = _gateway(
    "counter",
    "routing_decisions",
    "Routing decisions, by policy and by the source of the chosen endpoint's load: its own recent report, or only this "
    "gateway's counts.",
    ("model", "policy", "basis"),
)
GATEWAY_TTFT_ERROR = _gateway(
    "histogram",
    "ttft_prediction_error_ratio",
    "Absolute error of the time to first token by which an endpoint was chosen, relative to the measured time. Streams "
    "only.",
    ("model",),
    (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
GATEWAY_CACHED_PREDICTIONS = _gateway(
    "counter",
    "cached_token_predictions",
    "Answers by accuracy of the predicted number of cached prompt tokens: exact (to the prefix chunk), over (the "
    "engine found fewer) or under (it found more).",
    ("model", "outcome"),
)
GATEWAY_CACHED_ERROR_TOKENS = _gateway(
    "counter",
    "cached_token_prediction_error_tokens",
    "Sum of the absolute errors of predicted numbers of cached prompt tokens.",
    ("model",),
)
GATEWAY_QUEUE_REQUESTS = _gateway("gauge", "queue_requests", "Requests that wait for capacity.", ("model",))
GATEWAY_QUEUE_BYTES = _gateway("gauge", "queue_bytes", "Bytes of the bodies of waiting requests.", ("model",))
GATEWAY_QUEUE_OLDEST_SECONDS = _gateway(
    "gauge", "queue_oldest_seconds", "Time since the arrival of the oldest waiting request.", ("model",)
)
GATEWAY_QUEUE_SECONDS = _gateway(
    "histogram",
    "queue_seconds",
    "Time in the queue of requests that waited and were served.",
    ("model",),
    _FINE_TTFT_S,
)
GATEWAY_QUEUE_ENDED = _gateway(
    "counter",
    "queue_ended",
    "Requests that left the queue or could not enter it, by outcome: served, shed (displaced by another request), "
    "full, timeout, deadline, failed (no engine is expected any more) or left (the client disconnected).",
    ("model", "outcome"),
)
GATEWAY_RESERVED_BYTES = _gateway(
    "gauge", "endpoint_reserved_bytes", "KV cache this gateway has reserved on one engine.", ("model", "endpoint")
)
GATEWAY_TOKENS = _gateway(
    "counter",
    "tokens",
    "Tokens served, by kind: prompt, cached (part of prompt) or completion.",
    ("model", "variant", "kind"),
)
GATEWAY_ADAPTER_REQUESTS = _gateway(
    "counter", "adapter_requests", "Requests for LoRA adapters by outcome.", ("model", "adapter", "outcome")
)
GATEWAY_ADAPTER_TOKENS = _gateway(
    "counter",
    "adapter_tokens",
    "Tokens served with LoRA adapters, by kind: prompt, cached (part of prompt) or completion.",
    ("model", "adapter", "kind"),
)
GATEWAY_UPSTREAM_ATTEMPTS = _gateway(
    "counter", "upstream_attempts", "Requests sent to engines, by outcome.", ("model", "outcome")
)
GATEWAY_UPSTREAM_RETRIES = _gateway(
    "counter", "upstream_retries", "Requests restarted at another engine.", ("model", "reason")
)
GATEWAY_MIGRATIONS = _gateway(
    "counter",
    "migrations",
    "Answers that another engine continued, by reason.",
    ("model", "reason"),
)
GATEWAY_MIGRATED_TOKENS = _gateway(
    "counter", "migrated_tokens", "Generated tokens that another engine computed again to continue.", ("model",)
)
GATEWAY_JOURNAL_TOKENS = _gateway(
    "gauge", "journal_tokens", "Tokens stored so that other engines can continue answers."
)
GATEWAY_BROKEN_STREAMS = _gateway(
    "counter",
    "broken_streams",
    "Answers that broke off after their first token, by the failure of the last engine, or the error's code.",
    ("model", "reason"),
)
GATEWAY_POISON_PROBES = _gateway(
    "counter",
    "poison_probes",
    "Requests probed because engines failed with them, by outcome: cleared (a token was generated), ended (the engine "
    "failed again), left (neither happened) or blamed (never tried again).",
    ("model", "outcome"),
)
GATEWAY_REJECTED = _gateway(
    "counter",
    "requests_rejected",
    "Requests that ended with an error before they reached an engine, by error code.",
    ("code",),
)
GATEWAY_LIMITED = _gateway(
    "counter",
    "limited",
    "Requests refused by a limit of their key: requests, tokens, concurrency, budget_day or budget_month; tenant `-`: "
    "the key has none; model: the one that the limit is for, or `-`.",
    ("tenant", "reason", "model"),
)
GATEWAY_ENDED_BY_LIMIT = _gateway(
    "counter",
    "answers_ended_by_limit",
    "Answers that ended by `length` because no more tokens could be reserved within the limits of their key.",
    ("model",),
)
GATEWAY_RESERVE_SECONDS = _gateway(
    "histogram", "limits_reserve_seconds", "Reserving within the limits of one request's key.", buckets=_SHORT_S
)
GATEWAY_LIMITS_WITHOUT_REDIS = _gateway(
    "counter", "limits_decided_alone", "Reservations made with this gateway's own share, because Redis was unreachable."
)
GATEWAY_REDIS_UP = _gateway("gauge", "redis_up", "1 while Redis answers, 0 while not; absent without Redis.")
GATEWAY_KEYS_FILE_VALID = _gateway(
    "gauge",
    "api_keys_file_valid",
    "0 while `api_keys_file` cannot be read or has an invalid line, and the previous keys stay in use; else 1.",
)
GATEWAY_TENANT_TOKENS = _gateway(
    "counter",
    "tenant_tokens",
    "Tokens charged to each tenant, by kind: prompt or completion; tenant `-`: requests without one.",
    ("tenant", "model", "kind"),
)
GATEWAY_TENANT_REQUESTS = _gateway(
    "counter", "tenant_requests", "Requests of tenants by outcome, each counted once at its end.", ("tenant", "outcome")
)
GATEWAY_TENANT_ERROR_BUDGET = _gateway(
    "counter",
    "tenant_error_budget",
    "Failures that the `objective` of tenants' keys allows: of each request that counts, the allowed share.",
    ("tenant",),
)
GATEWAY_ENDPOINTS = _gateway(
    "gauge",
    "endpoints",
    "Known engines, by phase: ready, starting, stale, ejected, sleeping or draining.",
    ("model", "variant", "phase"),
)
GATEWAY_ENDPOINT_IN_FLIGHT = _gateway(
    "gauge",
    "endpoint_in_flight_requests",
    "Requests in progress at one engine from this gateway.",
    ("model", "endpoint"),
)
GATEWAY_STATE_AGE_SECONDS = _gateway(
    "gauge", "endpoint_state_age_seconds", "Age of the last state frame of one engine.", ("model", "endpoint")
)
GATEWAY_PREFIX_CHUNKS = _gateway(
    "gauge", "prefix_chunks", "Prefix chunks that engines report to be in their prefix caches, each once."
)
GATEWAY_CATALOG_MODELS = _gateway("gauge", "catalog_models", "Model names served, aliases not counted.")
GATEWAY_CATALOG_CURRENT = _gateway(
    "gauge", "catalog_current", "1 while the catalogue follows the cluster's objects, 0 while it is the last known one."
)
GATEWAY_CATALOG_OWN = _gateway(
    "gauge", "catalog_own", "1 if the gateway's settings have the models, so that no operator has objectives, else 0."
)
GATEWAY_READY = _gateway("gauge", "ready", "1 when requests are accepted, else 0.")
GATEWAY_WORKERS = _gateway("gauge", "workers", "Workers that serve clients (setting `workers`).")
GATEWAY_WORKERS_LOST = _gateway("counter", "workers_lost", "Worker processes that ended unexpectedly.")
GATEWAY_CONTROL_PROCESS_RESTARTS = _gateway("counter", "control_process_restarts", "Restarts of the control process.")


class Sample(NamedTuple):
    """One value of one series."""

    name: str
    """Exported name; that of a histogram ends with `_bucket`, `_sum` or `_count`."""
    labels: tuple[tuple[str, str], ...]
    value: float


Samples = dict[str, list[Sample]]
"""Samples by `MetricSpec.name`."""


class Scrape(NamedTuple):
    """The answer to a scrape."""

    body: bytes
    content_type: str


def first_token_bound(seconds: float) -> str:
    """Return the label `le` of the lowest bucket of `GATEWAY_TTFT_SECONDS` with a bound of at least `seconds`."""
    bound = next((bound for bound in _FINE_TTFT_S if bound >= seconds), math.inf)
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # the function that writes the labels


class Metrics:
    """The metric objects of one process, made from specs in a registry.

    `common` labels are filled into every metric that has them. A child is made once and then costs a dict lookup.
    """

    def __init__(self, specs: Iterable[MetricSpec], registry: CollectorRegistry | None = None, **common: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and carry no information
        self.registry = registry if registry is not None else CollectorRegistry()
        self._shown = self.registry
        """What is exported: the registry, or its series with other labels."""
        self._common = common
        self.num_updates = 0
        """Number of times an object was fetched to change its value."""
        self._parents: dict[str, MetricWrapperBase] = {spec.name: _make(spec, self.registry) for spec in specs}
        self._children: dict[tuple[str, ...], MetricWrapperBase] = {}
        """Objects by metric name and label values, in the order of the spec's labels."""
        self._asked: dict[tuple[object, ...], MetricWrapperBase] = {}
        """The same objects by labels in the order in which callers pass them: a cache for frequent calls."""

    def counter(self, spec: MetricSpec, **labels: str) -> Counter:
        return self._child(spec, labels, Counter)

    def gauge(self, spec: MetricSpec, **labels: str) -> Gauge:
        return self._child(spec, labels, Gauge)

    def histogram(self, spec: MetricSpec, **labels: str) -> Histogram:
        return self._child(spec, labels, Histogram)

    def begin(self, spec: MetricSpec, **labels: Iterable[str]) -> None:
        """Make the series of all combinations of these labels' values: without an earlier 0, Prometheus takes a first
        event for none. This is no update."""
        before = self.num_updates
        for values in product(*labels.values()):
            self._child(spec, dict(zip(labels, values, strict=True)), MetricWrapperBase)
        self.num_updates = before

    def forget(self, spec: MetricSpec, **labels: str) -> None:
        """Drop the series of an object that is gone, such as an endpoint."""
        values = self._values(spec, labels)
        if self._children.pop((spec.name, *values), None) is None:
            return
        self._asked.clear()
        self._parents[spec.name].remove(*values)

    def relabel(self, **common: str) -> None:
        """Show other values of labels that all series have in common; what was counted is kept."""
        self._shown = CollectorRegistry()
        self._shown.register(_Relabelled(self.registry, common))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._shown)

    def scrape(self, accept: str) -> Scrape:
        """Return all metrics in the format that the scraper's `Accept` requests: OpenMetrics, or Prometheus' text."""
        return _encode(self._shown, accept)

    def samples(self) -> Samples:
        """Return all current values, so that those of several processes can be added."""
        return {
            family.name: [Sample(each.name, tuple(each.labels.items()), each.value) for each in family.samples]
            for family in self._shown.collect()
        }

    def _child(self, spec: MetricSpec, labels: dict[str, str], kind: type[Wrapped]) -> Wrapped:
        self.num_updates += 1
        asked = (spec.name, *labels.items())
        child = self._asked.get(asked)
        if child is None:
            values, parent = self._values(spec, labels), self._parents[spec.name]
            child = parent.labels(*values) if spec.labels else parent
            self._asked[asked] = self._children[spec.name, *values] = child
        if not isinstance(child, kind):
            raise TypeError(f"{spec.name} is a {spec.kind}, not a {kind.__name__.lower()}")
        return child

    def _values(self, spec: MetricSpec, labels: dict[str, str]) -> list[str]:
        unknown = labels.keys() - set(spec.labels)
        if unknown:
            raise ValueError(f"{spec.name} has no label {', '.join(sorted(unknown))}")
        return [labels[name] if name in labels else self._common[name] for name in spec.labels]


def add_up(processes: Iterable[Samples]) -> Samples:
    """Return the sums of several processes' values, series by series."""
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for samples in processes:
        for family, series in samples.items():
            total = totals.setdefault(family, {})
            for name, labels, value in series:
                total[name, labels] = total.get((name, labels), 0.0) + value
    return {family: [Sample(*series, value) for series, value in total.items()] for family, total in totals.items()}


def scrape_samples(specs: Iterable[MetricSpec], samples: Samples, accept: str = "") -> Scrape:
    """Return samples of other processes in a scraper's format, as `Metrics.scrape` does."""
    registry = CollectorRegistry()
    registry.register(_Collected(list(specs), samples))
    return _encode(registry, accept)


def _encode(registry: CollectorRegistry, accept: str) -> Scrape:
    """Encode in the format that `accept` names.

    The library's own function is not used: its escaping turns the colon of vLLM's names into an underscore.
    """
    if "application/openmetrics-text" not in accept:
        return Scrape(generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8")
    body: bytes = openmetrics_text(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
    return Scrape(body, "application/openmetrics-text; version=1.0.0; charset=utf-8")


class _Relabelled(Collector):
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [self._relabelled(each) for each in family.samples]
            yield family

    def _relabelled(self, sample: ExportedSample) -> ExportedSample:
        changed = {name: self._labels.get(name, value) for name, value in sample.labels.items()}
        return sample._replace(labels=changed)


class _Collected(Collector):
    def __init__(self, specs: list[MetricSpec], samples: Samples) -> None:
        self._specs = specs
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        for spec in self._specs:
            family = Metric(spec.name, spec.help, spec.kind)
            for name, labels, value in self._samples.get(spec.name, ()):
                family.add_sample(name, dict(labels), value)
            yield family


def _make(spec: MetricSpec, registry: CollectorRegistry) -> MetricWrapperBase:
    if spec.kind == "counter":
        return Counter(spec.name, spec.help, spec.labels, registry=registry)
    if spec.kind == "gauge":
        return Gauge(spec.name, spec.help, spec.labels, registry=registry)
    return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=registry)
