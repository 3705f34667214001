"""Metric specs use vLLM's exact core names, and every spec produces a working metric."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill_operator.backends import deployment_metrics
from pagemill_operator.controller.reporting import metric_specs
from pagemill_protocol import metrics

ROOT = Path(__file__).resolve().parents[2]
ALL = [*metrics.ENGINE_METRICS, *metrics.GATEWAY_METRICS]


def test_names_used_by_dashboards_and_autoscalers_are_exported() -> None:
    exported = {spec.exported_name for spec in metrics.ENGINE_METRICS}
    assert exported >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:iteration_tokens_total",
    }


def test_buckets_are_those_of_existing_dashboards() -> None:
    assert metrics.TIME_TO_FIRST_TOKEN.buckets[:4] == (0.001, 0.005, 0.01, 0.02)
    assert metrics.TIME_TO_FIRST_TOKEN.buckets[-3:] == (160.0, 640.0, 2560.0)
    assert len(metrics.TIME_TO_FIRST_TOKEN.buckets) == 22
    assert metrics.INTER_TOKEN_LATENCY.buckets[-1] == 80.0
    assert metrics.E2E_REQUEST_LATENCY.buckets[-1] == 7680.0
    assert metrics.ITERATION_TOKENS.buckets[:3] == (1.0, 8.0, 16.0)
    assert metrics.REQUEST_PROMPT_TOKENS.buckets[:6] == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_a_spec_is_complete(spec: metrics.MetricSpec) -> None:
    assert re.fullmatch(r"(vllm:|pagemill_engine_|pagemill_gateway_)[a-z0-9_]+", spec.name)
    assert spec.help.endswith(".")
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))
    assert spec.kind != "counter" or not spec.name.endswith("_total")


def test_names_are_unique() -> None:
    assert len({spec.exported_name for spec in ALL}) == len(ALL)


def test_every_spec_produces_a_metric_in_a_scrape() -> None:
    made = metrics.Metrics(ALL, model_name="m", engine="0")
    for spec in ALL:
        labels = {name: "x" for name in spec.labels if name not in ("model_name", "engine")}
        if spec.kind == "counter":
            made.counter(spec, **labels).inc()
        elif spec.kind == "gauge":
            made.gauge(spec, **labels).set(1)
        else:
            made.histogram(spec, **labels).observe(1)
    families = {family.name: family for family in text_string_to_metric_families(made.render().decode())}
    for spec in ALL:
        assert families[spec.name].samples, spec.name
    assert families["vllm:num_requests_running"].samples[0].labels == {"model_name": "m", "engine": "0"}
    assert b"_created" not in made.render()


def test_children_are_created_once_and_removed_on_request() -> None:
    made = metrics.Metrics(metrics.GATEWAY_METRICS)
    spec = metrics.GATEWAY_ENDPOINT_IN_FLIGHT
    gauge = made.gauge(spec, model="m", endpoint="e")
    gauge.set(3)
    assert made.gauge(spec, endpoint="e", model="m") is gauge
    assert b'endpoint="e"' in made.render()
    made.forget(spec, model="m", endpoint="e")
    made.forget(spec, model="m", endpoint="never there")
    assert b'endpoint="e"' not in made.render()


def test_misuse_is_an_error() -> None:
    made = metrics.Metrics(metrics.GATEWAY_METRICS)
    with pytest.raises(TypeError, match="is a gauge"):
        made.counter(metrics.GATEWAY_READY)
    with pytest.raises(ValueError, match="no label color"):
        made.gauge(metrics.GATEWAY_IN_FLIGHT, color="red")


def test_metrics_of_several_processes_are_added_series_by_series() -> None:
    one, two = metrics.Metrics(metrics.GATEWAY_METRICS), metrics.Metrics(metrics.GATEWAY_METRICS)
    for each, count in ((one, 3), (two, 4)):
        each.counter(metrics.GATEWAY_LIMITED, tenant="a", reason="tokens", model="-").inc(count)
        each.histogram(metrics.GATEWAY_TTFT_SECONDS, model="m", variant="n/d").observe(count)
    two.gauge(metrics.GATEWAY_IN_FLIGHT, model="other").set(2)
    both = metrics.Metrics(metrics.GATEWAY_METRICS)
    both.counter(metrics.GATEWAY_LIMITED, tenant="a", reason="tokens", model="-").inc(7)
    for count in (3, 4):
        both.histogram(metrics.GATEWAY_TTFT_SECONDS, model="m", variant="n/d").observe(count)
    both.gauge(metrics.GATEWAY_IN_FLIGHT, model="other").set(2)
    together = metrics.add_up([one.samples(), two.samples()])
    assert metrics.scrape_samples(metrics.GATEWAY_METRICS, together).body == both.render()


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "text/plain;version=1.0.0;escaping=allow-utf-8",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,text/plain;version=0.0.4;q=0.3",
    ],
)
def test_names_are_the_same_in_every_format(accept: str) -> None:
    made = metrics.Metrics(metrics.ENGINE_METRICS, model_name="m", engine="0")
    made.counter(metrics.GENERATION_TOKENS).inc()
    scrape = made.scrape(accept)
    assert b'vllm:generation_tokens_total{engine="0",model_name="m"} 1.0' in scrape.body
    assert b"vllm_" not in scrape.body
    assert scrape.content_type.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain")
    assert scrape.body.endswith(b"# EOF\n") == ("openmetrics" in accept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("catalogue", "folders"),
    [(metrics, ("engine", "gateway")), (metric_specs, ("operator",)), (deployment_metrics, ("operator",))],
    ids=["engine and gateway", "operator", "deployments"],
)
def test_every_metric_is_set_by_some_code(catalogue: ModuleType, folders: tuple[str, ...]) -> None:
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = [line for path in sources for line in path.read_text("utf-8").splitlines()]
    code = "\n".join(line for line in lines if not re.match(r"[A-Z_]+ = |    [A-Z_]+,$|_?[A-Z_]+ = \[", line))
    names = [name for name, value in vars(catalogue).items() if isinstance(value, metrics.MetricSpec)]
    assert len(names) > 5
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("spec", [metrics.GATEWAY_TTFT_SECONDS, metrics.GATEWAY_REQUEST_SECONDS], ids=str)
def test_gateways_have_fine_buckets_around_50_milliseconds(spec: metrics.MetricSpec) -> None:
    assert {0.05, 0.1, 0.2} <= set(spec.buckets)
    assert any(0.02 <= bound < 0.05 for bound in spec.buckets)


def test_other_values_of_common_labels_keep_what_was_counted() -> None:
    exported = metrics.Metrics(metrics.ENGINE_METRICS, model_name="old", engine="0")
    exported.counter(metrics.REQUEST_SUCCESS, finished_reason="stop").inc(3)
    exported.relabel(model_name="new")
    exported.counter(metrics.REQUEST_SUCCESS, finished_reason="stop").inc()
    (family,) = [
        each
        for each in text_string_to_metric_families(exported.scrape("").body.decode())
        if each.name == "vllm:request_success"
    ]
    assert [(each.labels["model_name"], each.value) for each in family.samples] == [("new", 4.0)]
    assert 'model_name="old"' not in exported.render().decode()
