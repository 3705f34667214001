"""Rules and dashboards work with a real Prometheus that scrapes a real `pagemill up` under load.

The operator does not run outside a cluster, so its metrics registry is served by the test.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prometheus import Prometheus, prometheus
from waiting import WAIT_LIMIT_S, wait_until

from observability.dashboards import all_pages
from observability.rules import burn
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.plan.types import Group, Plan, Process
from pagemill_operator.status.observation import Observation, ReplicaObservation
from pagemill_protocol.resource.served import ServedModel

RULES = Path(__file__).resolve().parents[2] / "charts" / "pagemill" / "files" / "rules.yaml"
NAME = re.compile(r"\b((?:vllm:|pagemill_|controller_runtime_|workqueue_|rest_client_|leader_)[a-z0-9_]+)\b(?!:)")
SUFFIX = re.compile(r"_(bucket|count|sum|total)$")
"""The suffixes of series in addition to the name of their family in OpenMetrics, which Prometheus requests."""
SILENT = {
    "Fleet capacity: Minutes until saturation": "the use falls, or rises for too short a time",
    "Fleet capacity: Minutes until saturation over time": "the same",
    "Autoscaling: Forecast error": "there is no forecast of 30 minutes ago",
    "Gateway: Requests by tenant": "there are no keys",
    "Fleet capacity: Error budget burn of tenants": "the same",
    "Gateway: Time in the queue": "nothing waits",
    "Gateway: Error of predicted first tokens": "the simulated engine's step time is not fitted yet",
    "Model: Accepted by place": "nothing is proposed",
    "Model: Accepted proposals": "the same",
    "Model: Gain of proposals": "the same",
    "Model: Adapters": "there are none",
    "Model: Ranks of replicas": "each replica is one process",
    "Model: Time in which ranks compute": "the same",
    "Model: Time of ranks in a step": "the same",
    "Model: Loads and evictions of adapters": "the same",
    "Model: Requests by adapter": "the same",
}
"""Panels without data under this load, with the reason."""


@contextmanager
def operator_metrics() -> Iterator[int]:
    """Serve an operator's metrics after some work; yield the port."""
    metrics = OperatorMetrics()
    metrics.leads(True)
    metrics.watch(depth=lambda: 1, deployments=lambda: 1, watch_age_s=lambda kind: 2.0, kinds=["Pod"])
    group = Group("sim", 1, Process("pagemill_engine.server", {}, gpus=1), digest="a")
    scaling = ScalingSettings("Active", min_replicas=1, max_replicas=1, slo=Slo(ttft_ms=500))
    served = ServedModel(name="sim")
    plan = Plan("default", "sim", 1, served, "hf://sim", (group,), autoscaling=scaling, replica_price=2.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metrics.observed(Observation(plan, (ReplicaObservation("sim-0", "ready", "a"),)))
            metrics.reconciled("success", 0.1)
            metrics.taken(0.1)
            metrics.wrote("Deployment", "apply")
            metrics.responded("200", "GET")
            metrics.scaled("default/sim", 1)
            metrics.started({"load": 1.0})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(metrics.scrape().body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def pagemill_up(file: Path, environment: dict[str, str]) -> Iterator[tuple[str, list[int]]]:
    """Start `pagemill up`; yield the base URL, and the ports that have metrics."""
    command = [sys.executable, "-m", "pagemill", "up", "-f", str(file), "--port", "0", "--keep"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, text=True
    ) as process:
        assert process.stdout
        shown = ""
        for line in process.stdout:
            shown += line
            if "Ctrl-C stops everything" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:\d+(?=/v1)", shown)
        try:
            assert found is not None, shown
            yield found.group(), ports_with_metrics(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            process.wait(WAIT_LIMIT_S)


def ports_with_metrics(pid: int) -> list[int]:
    children = psutil.Process(pid).children(recursive=True)
    connections = [each for child in children for each in child.net_connections("tcp4")]
    ports = sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})
    return [port for port in ports if has_metrics(port)]


def has_metrics(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_LIMIT_S) as response:
            return b"pagemill_" in response.read()
    except OSError:
        return False


def ask(base_url: str, number: int) -> None:
    question = {"role": "user", "content": f"Question {number}: what is a page table?"}
    body = {"model": "sim", "messages": [question], "max_tokens": 40, "stream": number % 2 == 0}
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        response.read()


def fast_rules(folder: Path) -> Path:
    """Write the same rules with an evaluation every second."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        group["interval"] = "1s"
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def rule_expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def panel_expressions() -> list[tuple[str, str]]:
    """Return (dashboard and panel, expression with the variables at their defaults)."""
    values = {"$__rate_interval": "1m", "$job": ".+", "$instance": ".+", "$model": ".+"}
    found = []
    for page in all_pages():
        for panel in (panel for row in page.rows.values() for panel in row):
            for expression, _ in panel.targets:
                for name, value in values.items():
                    expression = expression.replace(name, value)
                found.append((f"{page.title.removeprefix('Pagemill / ')}: {panel.title}", expression))
    return found


def unknown_metrics(expressions: list[str], known: set[str]) -> set[str]:
    """Return metrics in `expressions` that are not exported; names after a colon are recorded by rules."""
    named = {name for expression in expressions for name in NAME.findall(re.sub(r'"[^"]*"', "", expression))}
    return {name for name in named if name not in known and SUFFIX.sub("", name) not in known}


def test_a_metric_that_is_not_exported_is_detected() -> None:
    expressions = ["rate(pagemill_seconds_bucket[5m]) / pagemill_lost + model:pagemill_headroom:ratio"]
    assert unknown_metrics(expressions, {"pagemill_seconds"}) == {"pagemill_lost"}
    assert unknown_metrics(["vllm:lost > 0"], set()) == {"vllm:lost"}


@pytest.mark.slow
def test_every_expression_runs_every_metric_exists_and_panels_have_data(
    write: Callable[..., Path],
    simulated: Callable[..., dict[str, Any]],
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    file = write("sim.yaml", simulated())
    with operator_metrics() as operator_port, pagemill_up(file, environment) as (base_url, ports):
        assert len(ports) >= 2, "those of an engine and of the gateway"
        jobs = [{"job_name": "pagemill", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}]
        jobs.append({"job_name": "operator", "static_configs": [{"targets": [f"127.0.0.1:{operator_port}"]}]})
        with prometheus(tmp_path, jobs, fast_rules(tmp_path)) as server:
            ask_until_rates_are_recorded(server, base_url)
            assert_rules_evaluate(server)
            assert_metrics_exist(server)
            assert_panels_have_data(server, base_url)


def ask_until_rates_are_recorded(server: Prometheus, base_url: str) -> None:
    num_asked = 0

    def are_recorded() -> bool:
        nonlocal num_asked
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: ask(base_url, number), range(num_asked, num_asked + 8)))
        num_asked += 8
        recorded = (
            "model:pagemill_cost:per_million_tokens > 0",
            "model:pagemill_waste:ratio",
            f"{burn('1h')} > -1",
            "count_over_time(pagemill_cold_start_phase_seconds_count[1m]) > 1",  # a rate needs two scrapes
        )
        return all(server.query(each) for each in recorded)

    wait_until(are_recorded, progress=lambda: num_asked, every_s=0.5)


def assert_rules_evaluate(server: Prometheus) -> None:
    rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(rule_expressions())
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}


def assert_metrics_exist(server: Prometheus) -> None:
    """Check that all metrics exist: a scrape declares the family of a counter even if it has no series yet."""
    known = set(server.get("metadata"))
    expressions = [*rule_expressions(), *(expression for _, expression in panel_expressions())]
    assert unknown_metrics(expressions, known) == set()


def assert_panels_have_data(server: Prometheus, base_url: str) -> None:
    titles = {title for title, _ in panel_expressions()}
    assert SILENT.keys() <= titles

    def have_data() -> bool:
        ask(base_url, 0)  # rates are those of the last minute
        ask(base_url, 1)
        found = {title for title, expression in panel_expressions() if server.query(expression)}
        silent[:] = sorted(titles - found - SILENT.keys())
        return not silent

    silent: list[str] = []
    wait_until(have_data, progress=lambda: tuple(silent), every_s=0.5)
